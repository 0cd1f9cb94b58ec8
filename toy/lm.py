"""The tiny language model that lets `python dppo.py` run whole on a laptop.

`make(directory)` writes what a real run starts from: an ordinary Hugging Face model directory
(Qwen3 architecture, 0.6 M parameters, one token a character) and a file of problems. A few
hundred supervised steps on additions turn random weights into a "base model": it has seen the
format and answers some of the problems some of the time, which is where RL starts from.
"""

import json
import os
import shutil
from pathlib import Path

import torch

LARGEST = 36  # both summands run over 0..36: 37 * 37 = 1,369 problems
SOLVED = 0.5  # the supervision stops when about one answer in two is right
# What `python dppo.py` runs with when no --model is given; any flag on the command line wins.
SETTINGS = dict(
    instruction="",  # the tokenizer knows digits, "+" and "=", no words
    solve_rate=(0.2, 0.8),
    prompts_per_step=128,
    group_size=8,
    minibatches=4,
    head_chunk=4096,  # logits of a vocabulary of 14 are small
    max_prompt=8,
    max_response=4,
    lr=2e-4,
    steps=400,
    eval_dataset="train",
    eval_every=20,
    eval_samples=4,
    stop_at=0.95,
)


def problems():
    """Every addition once, as rows {"prompt": "12+7=", "answer": "19"}."""
    numbers = range(LARGEST + 1)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]


def tokenizer():
    """One token a character and an end of sequence; no pad token and no chat template, on purpose:
    many real base models come without either."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *"0123456789+="])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>", model_max_length=16
    )


def random_model(vocab_size, seed=0, **config):
    """A Qwen3 causal LM with random weights; `config` overrides the tiny sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **config}))


def supervise(model, tok, until, seed=0, batch=128, lr=2e-3, most_steps=1000):
    """Next-token training on random additions until the model gives the right answer with mean
    probability `until`: a measured stop, since the number of steps varies from machine to machine.
    The loss counts the answer and its <eos> only."""
    rows, solved = problems(), 0.0
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(most_steps):
        chosen = [rows[i] for i in torch.randint(len(rows), (batch,), generator=draw)]
        prompts = [tok.encode(row["prompt"]) for row in chosen]
        answers = [tok.encode(row["answer"]) + [tok.eos_token_id] for row in chosen]
        length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = torch.zeros(batch, length, dtype=torch.long)
        valid = torch.zeros(batch, length, dtype=torch.bool)  # the tokens of the answers
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
            ids[i, : len(p) + len(a)] = torch.tensor(p + a)
            valid[i, len(p) : len(p) + len(a)] = True
        logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)  # (B, L-1, V)
        logp = logp.gather(-1, ids[:, 1:, None])[..., 0].where(valid[:, 1:], 0.0).sum(-1)  # (B,)
        solved = 0.9 * solved + 0.1 * logp.detach().exp().mean().item()
        if solved >= until:
            return
        optimizer.zero_grad()
        (-logp.sum() / valid.sum()).backward()
        optimizer.step()


def make(directory):
    """Make the base model and its problems once -> (model directory, problems.jsonl).

    Both appear under their names only when complete, so an interrupted first run leaves nothing
    that a second one would trust.
    """
    directory = Path(directory)
    if not directory.exists():
        partial = directory.with_name(f"{directory.name}.{os.getpid()}.partial")
        tok = tokenizer()
        model = random_model(len(tok))
        supervise(model, tok, SOLVED)
        model.save_pretrained(partial)
        tok.save_pretrained(partial)
        lines = "".join(json.dumps(row) + "\n" for row in problems())
        (partial / "problems.jsonl").write_text(lines)
        try:
            os.replace(partial, directory)
        except OSError:  # another run finished first: its model is the same
            shutil.rmtree(partial)
    return directory, directory / "problems.jsonl"
