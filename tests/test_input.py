"""Files, rows, tokenizers and models as people bring them: counted, or refused in one line."""

import json
import pickle
import shutil

import pytest
import torch
from test_engines import EOS, args_for, disturb, prompts_of
from test_task import load, refused
from test_training import SMALL

import dppo
from toy import lm

GOOD = {"prompt": "1+2=", "answer": "3"}
LINE = json.dumps(GOOD)


@pytest.fixture(scope="module")
def grader():
    g = dppo.Grader()
    yield g
    g.close()


@pytest.fixture(scope="module")
def tokenizer():
    return lm.tokenizer()


# ---------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "name, data",
    [
        ("a byte order mark", b"\xef\xbb\xbf" + LINE.encode()),
        ("lines that end in CR LF", LINE.encode() + b"\r\n" + LINE.encode() + b"\r\n"),
        ("no newline at the end", LINE.encode()),
        ("empty lines", LINE.encode() + b"\n\n\n" + LINE.encode() + b"\n\n"),
        ("a column that nobody asks for", b'{"prompt": "1+2=", "answer": "3", "x": {"y": []}}'),
    ],
)
def test_files_that_are_read(tmp_path, tokenizer, grader, name, data):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    args = dppo.parse_args(["--model", "none", "--instruction", ""])
    (problem,) = dppo.load_problems(str(path), args, tokenizer, grader)
    assert (problem.text, problem.gold) == ("1+2=", "3")


@pytest.mark.parametrize(
    "name, data",
    [
        ("empty", b""),
        ("white space", b"\n \n"),
        ("truncated", LINE.encode() + b'\n{"prompt": "1+3=", "ans'),
        ("not text", b"\x80\x81\xff\x00"),
        ("not JSON", b"prompt,answer\n1+2=,3\n"),
        ("not rows", b"[1, 2, 3]"),
        ("no file", None),
        ("a directory", ...),
        ("null answers only", b'{"prompt": "1+2=", "answer": null}'),
        ("lists as answers", b'{"prompt": "1+2=", "answer": ["3"]}'),
        ("columns with a terminal's commands", b'{"\\u001b[2Jq": 1, "a": 2}'),
    ],
)
def test_files_that_are_refused(tmp_path, capsys, models, name, data):
    path = tmp_path / "rows.jsonl"
    if data is ...:
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)
    flags = ["--model", models("tied"), "--max-prompt", "9", "--max-response", "9"]
    line = refused(capsys, *flags, "--dataset", str(path), "--out", str(tmp_path / "out"))
    assert str(path) in line and "\x1b" not in line
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "1+2=", "answer": None}, "1 without prompt or answer"),
        ({"prompt": None, "answer": "3"}, "1 without prompt or answer"),
        ({"prompt": "1+2=", "answer": "  "}, "1 without prompt or answer"),
        ({"prompt": "1" * 100_000, "answer": "3"}, "1 longer than 400 tokens"),
        ({"prompt": "2+2=", "answer": "9" * 100_000}, "1 whose answer the grader cannot read"),
        ({"prompt": "2+2=", "answer": "}{"}, "1 whose answer the grader cannot read"),
        (GOOD, "1 duplicate"),
        ({"prompt": "1+2=", "answer": "3.0"}, "1 with contradicting answers"),
    ],
)
def test_rows_that_are_dropped_are_counted(tmp_path, tokenizer, grader, capsys, row, reason):
    rows = [GOOD, {"prompt": "0+0=", "answer": "0"}, row]
    problems = load(tmp_path, tokenizer, grader, rows, "--max-prompt", "400")
    assert len(problems) == (1 if "contradicting" in reason else 2)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": "1+2="}],  # the template below asks for a user first
    ],
)
@pytest.mark.parametrize("template", [False, True])
def test_chats_that_form_no_prompt_are_counted(tmp_path, grader, capsys, messages, template):
    tok = lm.tokenizer()
    if template:
        tok.chat_template = (
            "{% if messages[0].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"
            "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}"
        )
    elif messages[0]["role"] == "assistant":
        messages = [{"role": "user", "content": {"text": "1"}}]  # roles do not matter there
    good = {"prompt": [{"role": "user", "content": "1+2="}], "answer": "3"}
    problems = load(tmp_path, tok, grader, [good, {"prompt": messages, "answer": "3"}])
    assert len(problems) == 1 and "1 that form no prompt" in capsys.readouterr().err


def test_unicode_and_control_characters_stay_what_they_are(tmp_path, grader, capsys):
    """In the prompt; on the screen they are inert."""
    text = "\u202e\x1b[31m1+2=\x00 \u4e09\U0001f600"
    (problem,) = load(tmp_path, lm.tokenizer(), grader, [{"prompt": text, "answer": "3"}])
    assert problem.text == text
    capsys.readouterr()
    dppo.say(f"{text}\n{json.dumps(text)}")
    said = capsys.readouterr().err
    assert not {"\x1b", "\x00", "\u202e"} & {*said} and said.count("\n") == 1


def test_an_answer_is_never_code(grader, tmp_path):
    target = tmp_path / "owned"
    for attack in (
        f"__import__('pathlib').Path('{target}').touch()",
        f"\\input{{{target}}}",
        f"\\write18{{touch {target}}}",
        "{{ ().__class__.__bases__ }}",
        "lambda: 1",
        "exec('1')",
    ):
        for text in (attack, f"Answer: {attack}", f"\\boxed{{{attack}}}"):
            assert grader([text, text], ["7", "x"]).tolist() == [0, 0]
            assert grader(["7"], [attack]).tolist() == [0]
    assert not target.exists()


# ------------------------------------------------------------------------ tokenizers and models


def test_a_tokenizer_without_pad_or_eos(models):
    """EOS comes from the model's config; nothing needs a pad token."""
    directory = models("no-eos", edit=lambda tok: setattr(tok, "eos_token", None))
    config, tok, eos = dppo.load_tokenizer(args_for(directory))
    assert tok.pad_token_id is None and tok.eos_token_id is None and eos == [EOS]


def test_no_eos_anywhere_is_refused(models, capsys):
    edit = lambda tok: setattr(tok, "eos_token", None)
    directory = models("never-ends", edit=edit, eos_token_id=None)
    with pytest.raises(SystemExit) as stop:
        dppo.load_tokenizer(args_for(directory))
    assert stop.value.code == 2 and "no end-of-sequence token" in capsys.readouterr().err


def test_a_head_that_is_wider_than_the_tokenizer(models):
    """Ids that no text has are sampled, scored and read like any other."""
    directory = models("wide", vocab_size=40)
    args = args_for(directory)
    config, tok, eos = dppo.load_tokenizer(args)
    model = dppo.load_model(args, config, eos)
    engine, prompts = dppo.HfEngine(args, eos, 40), prompts_of([3, 7])
    disturb(model, 1)
    engine.push(model)
    samples = engine.generate(prompts, 8, 0)
    assert max(s.y_ids[:, 0].max() for s in samples) >= len(tok)
    dppo.score(model, samples, args)
    assert dppo.check_engine(samples, exact=True).max() < 1e-4
    for s in samples:
        assert s.y_ids.shape[1] == 41 and isinstance(tok.decode(s.y_ids[:, 0]), str)
        assert torch.allclose(s.logmu.exp().sum(-1), torch.ones(len(s.y_ids)), atol=1e-5)


def test_a_run_with_several_ends_and_a_wide_head(models, tmp_path):
    directory = models("wide-ends", vocab_size=40, eos_token_id=[0, 7])
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(dict(prompt=f"{i}+0=", answer=i)) for i in range(20)))
    flags = [*SMALL, "--model", directory, "--dataset", str(rows), "--out", str(tmp_path / "run")]
    flags += "--method dppo-topk-tv --max-prompt 9 --max-response 5 --steps 1".split()
    dppo.main([*flags, "--group-size", "4", "--instruction", ""])
    assert (tmp_path / "run" / "step-000001" / "model.safetensors").exists()


class Touch:
    """What a malicious pickle does when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_weights_are_refused_unless_asked_for(models, tmp_path, capsys):
    directory = shutil.copytree(models("tied"), tmp_path / "pickled")
    from safetensors.torch import load_file

    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    short = ["--max-prompt", "9", "--max-response", "9"]
    line = refused(capsys, "--model", str(directory), *short, "--out", str(tmp_path / "out"))
    assert "--allow-pickle" in line
    args = args_for(str(directory), "--allow-pickle")
    config, _, eos = dppo.load_tokenizer(args)
    assert dppo.load_model(args, config, eos).lm_head.weight.isfinite().all()
    with open(directory / "pytorch_model.bin", "wb") as file:
        pickle.dump(Touch(tmp_path / "owned"), file)
    with pytest.raises(SystemExit):  # also then no code runs
        dppo.load_model(args, config, eos)
    assert not (tmp_path / "owned").exists()


def test_a_checkpoint_is_no_place_for_code(toy, tmp_path, capsys):
    dppo.main([*SMALL, "--steps", "1", "--out", str(toy[0] / "trap")])
    for path in dppo.checkpoints(toy[0] / "trap"):
        with open(path / "trainer.pt", "wb") as file:
            pickle.dump(Touch(tmp_path / "owned"), file)
    assert "no checkpoint" in refused(capsys, "--resume", str(toy[0] / "trap"))
    assert not (tmp_path / "owned").exists()


def test_code_of_a_model_runs_only_if_asked_for(models, tmp_path, capsys):
    directory = shutil.copytree(models("tied"), tmp_path / "code")
    config = json.loads((directory / "config.json").read_text())
    config |= dict(model_type="own", auto_map={"AutoConfig": "own.Config"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass Config: 0\n")
    line = refused(capsys, "--model", str(directory), "--max-prompt", "9", "--max-response", "9")
    assert "trust_remote_code" in line and not (tmp_path / "owned").exists()


# --------------------------------------------------------------------------------------- report


def said_at_start(monkeypatch, capsys, *flags):
    """The lines before the engine starts."""
    monkeypatch.setattr(dppo, "load_engine", lambda *_: dppo.die("the engine would start here"))
    with pytest.raises(SystemExit):
        dppo.main([*flags])
    return capsys.readouterr().err


def test_the_report_comes_before_the_long_work(toy, monkeypatch, capsys, tmp_path):
    said = said_at_start(monkeypatch, capsys, *SMALL, "--out", str(toy[0] / "report"))
    for part in (
        "1,369 rows, 1,369 prompts; dropped: none", "592,704 parameters in float32",
        "tied head: True", "EOS [0]", "no chat template", "distance=tv, delta=(0.15, 0.15)",
        "(unchanged)", f"torch {torch.__version__}", "transformers", "float32 compute",
    ):  # fmt: skip
        assert part in said
    assert "warning" not in said


@pytest.mark.parametrize(
    "flags, warning",
    [
        ("--method dppo-binary-kl --delta 0.2", "far from the row's (0.05, 0.05)"),
        ("--delta 0.01", "far from the row's (0.15, 0.15)"),
        ("--minibatches 1", "the mask hardly fires"),
        ("--temperature 0.7", "not the model's own law"),
        ("--prompts-per-step 2000", "some repeat"),
        ("--keep 100000000", "GB are free"),
    ],
)
def test_what_looks_like_a_mistake_is_one_line(toy, monkeypatch, capsys, flags, warning):
    said = said_at_start(monkeypatch, capsys, *flags.split(), "--out", str(toy[0] / "warned"))
    assert [line for line in said.splitlines() if "warning" in line and warning in line]
    assert said.count("warning") == 1


def test_a_task_that_teaches_nothing_is_said(models, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(dict(prompt=f"{i}=", answer="x+y")) for i in range(20)))
    flags = [*SMALL, "--model", models("tied"), "--dataset", str(rows), "--instruction", ""]
    flags += "--max-prompt 9 --max-response 3 --steps 1 --group-size 2".split()
    dppo.main([*flags, "--out", str(tmp_path / "run")])
    assert "warning: step 0: each group agrees (reward 0.000)" in capsys.readouterr().err
