"""Is the recorded mu the law that sampled? Both engines, against the trainer's own full softmax."""

import importlib.util
import math
import os
import sys

import pytest
import torch
from transformers import AutoTokenizer

import dppo

needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM not installed")
EOS, T = 0, 0.7


def args_for(directory, *flags):
    argv = ["--model", directory, "--temperature", str(T), "--max-prompt", "400", "--seed", "1"]
    return dppo.parse_args([*argv, "--max-response", "12", "--engine-dtype", "float32", *flags])


def load(directory):
    args = args_for(directory)
    config, _, eos = dppo.load_tokenizer(args)
    return args, dppo.load_model(args, config, eos)


def disturb(model, seed):
    """Other weights, as after an update."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=g)


@torch.no_grad()
def full_law(model, sample):
    """log mu over the whole vocabulary at each response token, from plain logits: (T, V)"""
    ids = torch.tensor([sample.prompt + sample.y_ids[:, 0].tolist()])
    logits = model(input_ids=ids).logits[0, len(sample.prompt) - 1 : -1]
    return (logits / T).log_softmax(-1)


def check_samples(model, prompts, samples, n, K, tolerance=1e-4):
    """Everything that the algorithm takes from an engine, against an independent forward pass."""
    assert [s.prompt for s in samples] == [p for p in prompts for _ in range(n)]
    for s in samples:
        law, (length, width) = full_law(model, s), s.y_ids.shape
        assert width == 1 + K and s.logmu.shape == (length, width) and 1 <= length <= 12
        present = s.logmu > -math.inf
        assert present[:, 0].all()
        want = law.gather(-1, s.y_ids)
        assert (want - s.logmu)[present].abs().max() < tolerance
        for t in range(length):  # TopK(mu) and y_t, each once
            named, y = s.y_ids[t][present[t]].tolist(), s.y_ids[t, 0].item()
            ranked = law[t].sort(descending=True).values
            if K in (0, 14) or ranked[K - 1] - ranked[K] > 1e-5:  # a tie may go either way
                assert sorted(named) == sorted({y, *law[t].topk(K).indices.tolist()})
            assert len(named) == len({*named})
        ended = s.y_ids[:, 0] == EOS
        assert not ended[:-1].any() and bool(ended[-1]) == s.stopped
        assert s.stopped or length == 12


def prompts_of(lengths):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(2, 14, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("K", [0, 3, 14])
def test_hf_engine_records_the_law_that_samples(models, tied, K):
    args, model = load(models("tied" if tied else "untied", tie_word_embeddings=tied))
    engine, prompts = dppo.HfEngine(args, [EOS], K), prompts_of([1, 5, 33])
    disturb(model, 1)
    engine.push(model)
    samples = engine.generate(prompts, 6, 0)
    check_samples(model, prompts, samples, 6, K)
    assert {s.stopped for s in samples} == {True, False}
    dppo.score(model, samples, args)
    assert dppo.check_engine(samples, exact=True).max() < 1e-4


def test_hf_engine_samples_from_mu(models):
    args, model = load(models("tied"))
    engine, (prompt,) = dppo.HfEngine(args, [EOS], 0), prompts_of([4])
    engine.push(model)
    first = torch.stack([s.y_ids[0, 0] for s in engine.generate([prompt], 4000, 0)])
    law = full_law(model, dppo.Sample(prompt, torch.tensor([[EOS]]), None, True))[0].exp()
    assert (torch.bincount(first, minlength=14) / 4000 - law).abs().max() < 0.03


def test_same_seed_same_samples_and_other_seed_others(models):
    args, model = load(models("tied"))
    engine, draws = dppo.HfEngine(args, [EOS], 0), []
    engine.push(model)
    for seed in (5, 5, 6):
        draws.append([s.y_ids.tolist() for s in engine.generate(prompts_of([4, 9]), 8, seed)])
    assert draws[0] == draws[1] != draws[2]
    assert len({str(y) for y in draws[0][:8]}) > 4  # the samples of a prompt differ
    check_company(engine)


def check_company(engine):
    """What a prompt draws does not depend on what is sampled beside it; no seed serves twice."""
    ids = lambda prompts, seed: [s.y_ids.tolist() for s in engine.generate(prompts, 8, seed)]
    prompts = prompts_of([9, 4, 9])
    assert ids(prompts, 100)[8:] == ids(prompts[1:], 108)
    assert len({str(y) for y in ids([prompts[0]] * 4, 100)}) > 16


def test_scoring_ignores_padding_and_company(models):
    args, model = load(models("tied"))
    engine = dppo.HfEngine(args, [EOS], 2)
    engine.push(model)
    samples = engine.generate(prompts_of([2, 40, 7, 7]), 2, 0)
    dppo.score(model, samples, args)
    together = [s.old for s in samples]
    args.micro_batch_tokens, args.head_chunk = 1, 3
    dppo.score(model, samples, args)
    for s, old in zip(samples, together):
        assert torch.allclose(s.old, old, atol=1e-5) and (s.old == -math.inf).equal(
            s.logmu == -math.inf
        )


def test_the_end_of_a_response_is_trained_also_where_pad_is_eos(models):
    """EOS keeps its place in the response: nothing compares ids with a pad id."""
    directory = models("pad-is-eos", edit=lambda tok: setattr(tok, "pad_token", tok.eos_token))
    args, model = load(directory)
    assert AutoTokenizer.from_pretrained(directory).pad_token_id == EOS
    ids = [5, EOS, 6]  # an EOS inside the prompt ends nothing
    y = torch.tensor([[7], [EOS]])
    sample = dppo.Sample(
        ids, y, full_law(model, dppo.Sample(ids, y, None, True)).gather(-1, y), True
    )
    dppo.score(model, [sample], args)
    assert torch.allclose(sample.old, sample.logmu, atol=1e-5)


@pytest.fixture(scope="module")
def environment():
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"


@needs_vllm
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_records_the_law_that_samples_after_every_push(models, tied, environment):
    args, model = load(models("tied" if tied else "untied", tie_word_embeddings=tied))
    K, n, prompts = 5, 4, prompts_of([3, 300, 9])  # 300 tokens fill cache blocks of 128
    engine = dppo.VllmEngine(args, [EOS], K)
    draws = []
    for version in range(3):
        if version:
            disturb(model, version)
        engine.push(model)
        samples = engine.generate(prompts, n, 0)
        check_samples(model, prompts, samples, n, K)
        dppo.score(model, samples, args)
        assert dppo.check_engine(samples, exact=True).max() < 1e-4
        draws.append([s.y_ids[:, 0].tolist() for s in samples])
    assert draws[0] != draws[1] != draws[2]
    assert torch.get_num_threads() == THREADS
    check_company(engine)

    # an engine that missed a push is found out
    disturb(model, 3)
    samples = engine.generate(prompts, n, 0)
    dppo.score(model, samples, args)
    with pytest.raises(dppo.Stop, match="differ by"):
        dppo.check_engine(samples, exact=True)


THREADS = torch.get_num_threads()


@needs_vllm
def test_vllm_and_hf_engines_return_the_same_kind_of_thing(models, environment):
    """K up to the vocabulary; the same model gives the same frequencies."""
    args, model = load(models("tied"))
    prompts, n, firsts = prompts_of([4]), 3000, []
    for engine in (dppo.VllmEngine(args, [EOS], 14), dppo.HfEngine(args, [EOS], 14)):
        engine.push(model)
        samples = engine.generate(prompts, n, 0)
        check_samples(model, prompts, samples[:20], 20, 14)
        firsts.append(
            torch.bincount(torch.stack([s.y_ids[0, 0] for s in samples]), minlength=14) / n
        )
        for s in samples[:5]:
            assert s.y_ids.dtype == torch.int64 and s.logmu.dtype == torch.float32
    assert (firsts[0] - firsts[1]).abs().max() < 0.04


@needs_vllm
def test_vllm_ignores_the_models_own_sampling_settings(models, tmp_path, environment):
    from transformers import GenerationConfig

    args, model = load(models("tied"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(tmp_path)
    settings = dict(do_sample=True, temperature=0.1, top_k=2, top_p=0.5, repetition_penalty=1.3)
    GenerationConfig(eos_token_id=[EOS, 5], max_new_tokens=3, **settings).save_pretrained(tmp_path)
    args.model = str(tmp_path)
    _, _, eos = dppo.load_tokenizer(args)
    assert eos == [EOS, 5]
    engine, prompts = dppo.VllmEngine(args, eos, 0), prompts_of([4, 6])
    engine.push(model)
    samples = engine.generate(prompts, 40, 0)
    dppo.score(model, samples, args)
    assert dppo.check_engine(samples, exact=True).max() < 1e-4
    lasts = {s.y_ids[-1, 0].item() for s in samples if s.stopped}
    assert lasts == {EOS, 5} and max(len(s.y_ids) for s in samples) > 3


def test_no_engine_dtype_is_lost_when_vllm_is_not_there(models, monkeypatch, capsys):
    """--engine auto falls back to the trainer's own module, which has the trainer's dtype only."""
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import that fails, as if not installed
    args = dppo.parse_args(["--model", models("tied"), "--engine-dtype", "bfloat16"])
    with pytest.raises(SystemExit) as stop:
        dppo.load_engine(args, [0], 0)
    assert stop.value.code == 2 and "leave out --engine-dtype" in capsys.readouterr().err
    assert isinstance(
        dppo.load_engine(dppo.replace(args, engine_dtype="auto"), [0], 0), dppo.HfEngine
    )
