"""What is asked and what counts as right: rows, prompts, answers, flags."""

import json
import subprocess
import sys
import time

import pytest

import dppo
from conftest import ROOT
from toy import lm


@pytest.fixture(scope="module")
def grader():
    g = dppo.Grader()
    yield g
    g.close()


@pytest.fixture(scope="module")
def tokenizer():
    return lm.tokenizer()


# -------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "text, answer",
    [
        ("Answer: $34$", "34"),
        ("so it is \\boxed{34}", "34"),
        ("34", "34"),
        ("34.", "34"),
        ("7 + 5 = 12\n#### 12", "12"),
        ("**Answer:** 1,234.", "1234"),
        ("Answer: 3\nno, wait\nAnswer: 4", "4"),
        ("\\boxed{1} or rather \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("Answer: \\boxed{4}", "4"),
        ("\\boxed{5} and then \\boxed{6 never closed", "5"),
        ("first \\boxed{5}, then Answer: 6", "6"),
        ("#### Final Answer: 5", "5"),
        ("Answer: `5`.", "5"),
        ("I do not know", ""),
        ("", ""),
    ],
)
def test_final_answer(text, answer):
    assert dppo.final_answer(text) == answer


@pytest.mark.parametrize(
    "text, gold, right",
    [
        ("34", "34", 1),
        ("Answer: 34.0", "34", 1),
        ("Answer: 1/2", "0.5", 1),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("\\boxed{1024}", "2^{10}", 1),
        ("\\boxed{(1,2)}", "(1,2)", 1),
        ("\\boxed{B}", "\\text{B}", 1),
        ("Answer: 3 + 4 = 7", "7", 1),
        ("Answer: 3 + 4 = 8", "7", 0),
        ("Answer: 3 + 4", "7", 0),  # the question again
        ("\\boxed{(3)+(4)}", "7", 0),
        ("\\boxed{3 \\times 4}", "12", 0),
        ("\\boxed{10^{-3}}", "0.001", 1),
        ("Answer: 35", "34", 0),
        ("\\boxed{(2,1)}", "(1,2)", 0),
        ("I think that 34 is right", "34", 0),
        ("", "34", 0),
        ("1/0", "34", 0),
        ("\u0664\u0662", "42", 1),  # digits of another script are digits
        ("Answer: __import__('os').system('touch /tmp/owned')", "34", 0),
    ],
)
def test_reward(grader, text, gold, right):
    assert grader([text], [gold]).tolist() == [right]


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^{9}}}", "{" * 400, "\\frac{" * 80, "((((" * 100, "x" * 100_000, "1e999999999"],
)
def test_no_answer_takes_more_than_seconds(grader, answer):
    grader(["\\boxed{x}"], ["y"])  # the worker is up
    start = time.monotonic()
    assert grader(["\\boxed{" + answer + "}"], ["34"]).tolist() == [0.0]
    assert time.monotonic() - start < 5  # 1 s for the answer; the rest is for a slow machine
    assert grader(["34", "\\boxed{\\frac{4}{8}}"], ["34", "\\frac12"]).tolist() == [1.0, 1.0]


def test_a_batch_has_a_bound_of_its_own(monkeypatch):
    monkeypatch.setattr(dppo.Grader, "BATCH_SECONDS", 3.0)
    monkeypatch.setattr(dppo.Grader, "MEAN_SECONDS", 0.0)
    grader, start = dppo.Grader(), time.monotonic()
    R = grader(["\\boxed{9^{9^{9^{9}}}}"] * 50 + ["34"], ["7"] * 50 + ["34"])
    grader.close()
    assert time.monotonic() - start < 30 and grader.timeouts == 50
    assert R.tolist() == [0.0] * 50 + [1.0]  # numbers need no time


# ----------------------------------------------------------------------------------------- rows


def args_for(tmp_path, rows, *flags, suffix=".jsonl"):
    path = tmp_path / f"rows{suffix}"
    text = "\n".join(json.dumps(row) for row in rows) if suffix == ".jsonl" else json.dumps(rows)
    path.write_text(text)
    argv = ["--model", "none", "--dataset", str(path), "--instruction", "", *flags]
    return str(path), dppo.parse_args(argv)


def load(tmp_path, tokenizer, grader, rows, *flags, **kwargs):
    path, args = args_for(tmp_path, rows, *flags, **kwargs)
    return dppo.load_problems(path, args, tokenizer, grader)


CHAT = [{"role": "user", "content": "1+2="}]
KNOWN = {
    "DAPO": {"prompt": CHAT, "reward_model": {"ground_truth": "3", "style": "rule"}},
    "GSM8K": {"question": "1+2=", "answer": "One and two\nare 3.\n#### 3"},
    "MATH": {"problem": "1+2=", "solution": "It is $\\boxed{3}$."},
    "MATH-500": {"problem": "1+2=", "solution": "\\boxed{9}", "answer": "3"},
    "plain": {"prompt": "1+2=", "answer": 3},
}


@pytest.mark.parametrize("shape", KNOWN)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_known_shapes_of_rows(tmp_path, tokenizer, grader, shape, suffix):
    (problem,) = load(tmp_path, tokenizer, grader, [KNOWN[shape]], suffix=suffix)
    assert (problem.text, problem.gold) == ("1+2=", "3")
    assert problem.ids == tokenizer.encode("1+2=")


def test_parquet_rows_and_columns_named_by_flags(tmp_path, tokenizer, grader):
    from datasets import Dataset

    path = str(tmp_path / "rows.parquet")
    Dataset.from_list([{"q": "1+2=", "a": "3"}]).to_parquet(path)
    argv = ["--model", "none", "--dataset", path, "--instruction", ""]
    args = dppo.parse_args([*argv, "--prompt-column", "q", "--answer-column", "a"])
    (problem,) = dppo.load_problems(path, args, tokenizer, grader)
    assert (problem.text, problem.gold) == ("1+2=", "3")


def test_a_split_is_named_after_the_config(tmp_path, tokenizer, grader):
    from datasets import Dataset

    Dataset.from_list([KNOWN["MATH-500"]]).to_parquet(str(tmp_path / "test.parquet"))
    args = dppo.parse_args(["--model", "none", "--instruction", ""])
    (problem,) = dppo.load_problems(f"{tmp_path}::test", args, tokenizer, grader)
    assert (problem.text, problem.gold) == ("1+2=", "3")


def test_what_is_dropped_is_counted_by_reason(tmp_path, tokenizer, grader, capsys):
    rows = [{"prompt": "1+2=", "answer": "3"}] * 100  # DAPO-Math-17k in small
    rows += [{"prompt": "2+2=", "answer": "4"}, {"prompt": "2+2=", "answer": "5"}]
    rows += [{"prompt": "1" * 40, "answer": "1"}, {"prompt": "", "answer": "1"}]
    rows += [{"prompt": "3+3=", "answer": None}, {"prompt": "4+4=", "answer": "}{"}]
    problems = load(tmp_path, tokenizer, grader, rows, "--max-prompt", "30")
    assert [p.text for p in problems] == ["1+2="]
    said = capsys.readouterr().err
    for line in ("106 rows, 1 prompts", "100 duplicate", "1 with contradicting answers",
                 "1 longer than 30 tokens", "2 without prompt or answer",
                 "1 whose answer the grader cannot read"):  # fmt: skip
        assert line in said


def test_instruction_goes_to_plain_questions_only(tmp_path, tokenizer, grader):
    rows = [{"prompt": "1+2=", "answer": "3"}]
    assert load(tmp_path, tokenizer, grader, rows, "--instruction", "==")[0].text == "1+2=\n=="
    assert (
        load(tmp_path, tokenizer, grader, [KNOWN["DAPO"]], "--instruction", "==")[0].text == "1+2="
    )


def test_bos_stands_once_with_and_without_a_template():
    from tokenizers.processors import TemplateProcessing

    plain = lm.tokenizer()
    bos = plain.encode("+")[0]  # any token will do as BOS
    plain.backend_tokenizer.post_processor = TemplateProcessing(
        single="+ $A", special_tokens=[("+", bos)]
    )
    ids = lambda: dppo.encode(plain, [{"role": "user", "content": "1"}])[1]
    assert ids().count(bos) == 1
    plain.chat_template = "+{{ messages[0].content }}"
    assert ids().count(bos) == 1


def test_messages_become_text_by_the_template():
    tok = lm.tokenizer()
    tok.chat_template = "{{ messages[0].content }}+{% if add_generation_prompt %}={% endif %}"
    text, ids = dppo.encode(tok, [{"role": "user", "content": "12"}])
    assert text == "12+=" and ids == tok.encode("12+=") and isinstance(ids[0], int)


# ---------------------------------------------------------------------------------------- flags


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        dppo.main([*argv])
    said = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and said[-1].startswith("dppo: ")
    assert sum(line.startswith("dppo: ") for line in said) == 1
    return said[-1]


def test_bad_flags_are_refused_with_one_line(capsys, tmp_path):
    say = lambda *argv: refused(capsys, *argv)
    assert "top-p" in say("--top-p", "0.9") and "mu of the theory" in say("--top-p", "0.9")
    assert "2 or more" in say("--group-size", "1")
    assert "choose from dppo-binary-tv" in say("--method", "ppo")
    assert "must be positive" in say("--delta", "0")
    assert "must be positive" in say("--delta-low", "-1")
    assert "must be positive" in say("--temperature", "0")
    assert "must be positive" in say("--lr", "nan")
    assert "0 or more" in say("--top-k", "-1")
    assert "LOW <= HIGH" in say("--solve-rate", "0.8", "0.2")
    assert "--eval-dataset" in say("--model", "x", "--stop-at", "0.9")
    assert "at most 1" in say("--gpu-memory", "2")
    assert "is a file" in say("--out", str(ROOT / "README.md"))
    assert "y_t only" in say("--method", "grpo", "--top-k", "5")
    assert "vocabulary" in say("--top-k", "999", "--out", str(tmp_path / "a" / "b"))
    assert "--dataset needs --model" in say("--dataset", "x.jsonl")
    assert "invalid int" in say("--steps", "many")
    assert "--minibatches" in say("--prompts-per-step", "2", "--minibatches", "3")


def test_bad_input_is_refused_with_one_line(capsys, tmp_path, models):
    model = models("tied")
    short = ["--max-prompt", "9", "--max-response", "9", "--instruction", ""]
    say = lambda *argv: refused(capsys, *short, *argv)
    assert "--model /no/such" in say("--model", "/no/such")
    rows = tmp_path / "rows.jsonl"
    data = ["--model", model, "--dataset", str(rows)]
    assert "cannot read" in say(*data)
    rows.write_text("")
    assert "dppo: " in say(*data)
    rows.write_text('{"prompt": "1+1=", "ans')
    assert "cannot read" in say(*data)
    rows.write_text('{"ask": "1+1=", "reply": "2"}')
    assert "'ask', 'reply'" in say(*data) and "--prompt-column" in say(*data)
    rows.write_text('{"prompt": "1+1=", "answer": ""}')
    assert "no row is left" in say(*data)
    rows.write_text('{"prompt": "1+1=", "answer": "2"}')
    assert "softcapping" in say(*data[2:], "--model", models("soft", final_logit_softcapping=30.0))
    assert "the trainer's float32" in say(*data, "--engine", "hf", "--engine-dtype", "bfloat16")
    assert "positions" in say(*data, "--max-response", "9999")
    assert "is not installed" in say(*data, "--tracker", "trackio")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    assert "another run" in say(*data, "--out", str(tmp_path / "run"))


def test_row_and_overrides_make_the_effective_method():
    method = lambda *argv: dppo.effective_method(dppo.parse_args([*argv]))
    assert method() == dppo.METHODS["dppo-binary-tv"]
    assert method("--method", "dppo-binary-kl").delta == (0.05, 0.05)  # a default for each distance
    assert method("--delta", "0.3").delta == (0.3, 0.3)
    assert method("--delta", "0.3", "--delta-low", "0.1").delta == (0.1, 0.3)
    assert method("--method", "mask-0.5", "--delta-low", "0.2").delta == (0.2, float("inf"))
    m = method("--method", "dppo-topk-kl", "--top-k", "7", "--is-cap", "5")
    assert (m.top_k, m.cap, m.distance) == (7, 5.0, dppo.kl)


def test_import_is_light_and_help_names_every_flag():
    code = "import dppo, sys; print({'vllm', 'transformers', 'datasets'} & sys.modules.keys())"
    run = lambda *argv: (
        subprocess.run(
            [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    )
    assert run("-c", code).strip() == "set()"
    text = run("dppo.py", "--help")
    for name in dppo.Args.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text


def test_every_way_to_end_a_response_is_in_the_eos_set(models, tmp_path):
    """The tokenizer says one, the generation config a list, the chat template its end of turn."""
    from transformers import GenerationConfig

    template = "{% for m in messages %}{{ m.content }}<unk>=\n{% endfor %}"
    edit = lambda tok: setattr(tok, "chat_template", template)
    directory = models("chat", edit=edit)
    args = dppo.parse_args(["--model", directory, "--max-prompt", "9", "--max-response", "9"])
    assert dppo.load_tokenizer(args)[2] == [0, 1]  # <eos>, and <unk> by the template
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(directory)
    assert dppo.load_tokenizer(args)[2] == [0, 1, 5, 6]
