"""DPPO, Divergence Proximal Policy Optimization (arXiv:2602.04879): one batch's way, in one file.

    python dppo.py                                      a laptop: makes its own tiny base model
    python dppo.py --model Qwen/Qwen3-1.7B-Base         one GPU, on DAPO-Math-17k
    python dppo.py --model DIR --dataset FILE.jsonl     anything else; see --help

Given a prompt x, the inference engine samples y = (y_1 .. y_T); s_t = (x, y_<t). Then

    A    =  R(y) - mean of R over the prompt's group                             group_advantages
    r_t  =  pi(y_t|s_t) / mu(y_t|s_t)
    D_t  =  TV or KL between mu(.|s_t) and pi(.|s_t), with unlisted tokens pooled          tv, kl
    M_t  =  0 if the update leads away from mu and D_t > delta, else 1                  keep_mask
    maximise  E_mu sum_t M_t r_t A,  by the gradient  M_t min(r_t, C) A grad log pi   policy_loss

PPO is the case D_t = |r_t - 1|, and every method that the paper compares with is a row of METHODS.
Statements and proofs are in theory.md; `theory.md#...` names the block that a line comes from.

    paper        here           shape     what
    y_t          y_ids[:, 0]    (N, 1+K)  slot 0 is y_t, the other slots TopK(mu) without y_t
    mu           mu, logmu      (N, 1+K)  the engine's law, recorded as it samples, never recomputed
    pi           pi, logpi      (N, 1+K)  the trainer's law; only log pi(y_t) carries a gradient
    pi_theta'    old            (N, 1+K)  the log of the trainer's law at the rollout's weights
    R, A         R, A           (B,)      of a response, all its tokens share A; r is the ratio
    D, M         D, keep        (N,)      keep is M as a bool
    delta        delta          pair      radius for A < 0 and for A > 0
    C            cap                      bounds the weight r; 10, or too large to matter

N counts the response tokens of a batch one after the other, so there is no padding to mask. An
absent slot (y_t stands among the top K already) has logmu = logpi = -inf. Binary is K = 0.

Absent on purpose: reference model, critic, entropy bonus, LoRA, multi-turn and async rollouts.
"""

import argparse
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import MethodType
from typing import NoReturn

# Idle threads of torch and vLLM spin for long by default, which starves whatever else runs here.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import Tensor, distributed
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AUTO_DTYPE, HEAD_CHUNK = ("bfloat16", 1024) if DEVICE == "cuda" else ("float32", 128)
DAPO = "BytedTsinghua-SIA/DAPO-Math-17k"
INSTRUCTION = 'Think step by step, then end with a line "Answer: X" where X is the final answer.'
# `torchrun --nproc-per-node N dppo.py` starts N ranks; alone this process is all of them
WORLD = int(os.environ["WORLD_SIZE"]) if distributed.is_torchelastic_launched() else 1
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0
DTYPES, AGGS = ["auto", "float32", "bfloat16"], ["constant", "token-mean"]
# what the problems of a run and their order come from: a resumed run reads them back
FIXED = "model dataset prompt_column answer_column instruction solve_rate max_prompt".split()
FIXED += "solve_rate_samples prompts_per_step seed".split()

# ------------------------------------------------------------------------------- configuration


def flag(default, text, **kwargs):
    return field(default=default, metadata=dict(help=text, **kwargs))


FLAG_TYPES = {bool: dict(action=argparse.BooleanOptionalAction)}
FLAG_TYPES |= {tuple: dict(type=float, nargs=2, metavar=("LOW", "HIGH"))}


@dataclass
class Args:
    # "paper": from the authors' recipe for their 30B run. None: see the text.
    model: str = flag("", "hub id or directory; without it the toy model, set up by toy/lm.py")
    dataset: str = flag(DAPO, ".jsonl, .json or .parquet file, or hub NAME[:CONFIG[:SPLIT]]")
    prompt_column: str = flag("", "column of the prompt, for rows of no known shape")
    answer_column: str = flag("", "column of the answer, for rows of no known shape")
    instruction: str = flag(INSTRUCTION, "added to a plain-text question; chats bring their own")
    solve_rate: tuple = flag((0.0, 1.0), "keep the prompts that the model solves this often")
    solve_rate_samples: int = flag(16, "samples a prompt to estimate --solve-rate")
    eval_dataset: str = flag("", 'like --dataset, or "train": the training prompts; empty: none')
    eval_every: int = flag(20, "steps between evaluations")
    eval_samples: int = flag(4, "samples a prompt in an evaluation, at the training temperature")
    stop_at: float = flag(None, "stop at this evaluation accuracy")

    engine: str = flag("auto", "auto: vllm if installed", choices=["auto", "vllm", "hf"])
    engine_dtype: str = flag("auto", "auto: bfloat16 on a GPU, else float32", choices=DTYPES)
    gpu_memory: float = flag(0.4, "share of the GPU for vLLM while it samples; 0 while training")
    prompts_per_step: int = flag(64, "prompts a rollout (paper: 256; a quarter, for one GPU)")
    group_size: int = flag(16, "samples a prompt, G (paper)")
    temperature: float = flag(1.0, "of mu and of pi (paper)")
    max_prompt: int = flag(2048, "tokens; longer prompts are dropped and counted")
    max_response: int = flag(8192, "tokens, T (paper)")

    method: str = flag("dppo-binary-tv", "a row of METHODS (the paper's first choice)")
    delta: float = flag(None, "radius for both signs of A; None: the row's")
    delta_low: float = flag(None, "radius for A < 0")
    delta_high: float = flag(None, "radius for A > 0")
    top_k: int = flag(None, "K of the divergence (not of the sampling); 0 is Binary")
    is_cap: float = flag(None, "C in min(r, C)")
    normalize_std: bool = flag(False, "divide A by the group's standard deviation, as GRPO does")
    loss_agg: str = flag("constant", "sum / (sequences * max_response): paper", choices=AGGS)

    steps: int = flag(500, "rollouts")
    minibatches: int = flag(8, "optimizer steps a rollout (paper: 256 prompts / 32)")
    lr: float = flag(1e-6, "AdamW, constant (paper)")
    weight_decay: float = flag(0.0, "AdamW")
    max_grad_norm: float = flag(1.0, "gradient clipping")
    micro_batch_tokens: int = flag(16384, "padded tokens a forward; memory only, not results")
    head_chunk: int = flag(HEAD_CHUNK, "tokens whose logits exist at once (GPU: 1024); memory only")
    seed: int = flag(0, "with --engine hf on a CPU a run repeats exactly")
    out: str = flag("", "new directory for the run; default runs/METHOD-MODEL-TIME")
    resume: str = flag(None, "go on with this run, or the newest in runs/", nargs="?", const="")
    save_every: int = flag(20, "steps between checkpoints, of 12 bytes a parameter each")
    keep: int = flag(2, "how many checkpoints stay, the newest ones")
    tracker: str = flag("none", "log there too", choices=["none", "wandb", "trackio"])
    trust_remote_code: bool = flag(False, "run code that the model directory brings")
    allow_pickle: bool = flag(False, "load weights from other files than .safetensors")


def one_line(message):
    """Nothing that a terminal obeys: messages quote data sets, models and other libraries."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(message)).split())


def die(message, code=2) -> NoReturn:
    """End with one line that says what is wrong and what to do. code 2: the input, 1: the run."""
    if RANK == 0 or code == 1:  # the ranks agree on the input, not on what goes wrong
        print("dppo:", one_line(message), file=sys.stderr)
    raise SystemExit(code)


def say(message):
    if RANK == 0:
        tqdm.write(one_line(message), file=sys.stderr)  # above the progress bar


class Stop(Exception):
    """The run must end, or it would train on garbage; run() says at which step and stage."""


def parse_args(argv=None) -> Args:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("dppo.py", formatter_class=formatter, allow_abbrev=False)
    parser.error = lambda message: die(
        f"{message}. --help lists the flags. There is none for top-p, min-p or penalties: "
        "a truncated sampler is not the mu of the theory"
    )
    for f in fields(Args):
        kwargs = FLAG_TYPES.get(f.type, dict(type=f.type)) | f.metadata
        parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, **kwargs)
    given, saved = parser.parse_args(argv), {}
    if given.resume is not None:
        if given.out:
            die("--out cannot change on --resume: the run goes on in its own directory")
        out, saved = config_of(given.resume)
        parser.set_defaults(**saved)  # the command line wins
    elif not given.model:
        from toy import lm

        parser.set_defaults(**lm.SETTINGS)
    args = Args(**vars(parser.parse_args(argv)))
    if saved:
        args.resume = args.out = out
    for name in saved:
        old, new, text = saved[name], getattr(args, name), f"--{name.replace('_', '-')}"
        if new != old and name in FIXED:
            die(f"--resume: {text} cannot change from {old} to {new}: start a new run")
        if new != old:
            say(f"--resume: {text} was {old}, is now {new}")
    for f in fields(Args):
        value, zero = getattr(args, f.name), f.name in ("top_k", "weight_decay", "seed")
        if f.type in (int, float) and value is not None:
            if not (0 < value < INF or (zero and value == 0)):
                least = "0 or more" if zero else "positive"
                die(f"--{f.name.replace('_', '-')} must be {least}, not {value}")
    if not 0 <= args.solve_rate[0] <= args.solve_rate[1] <= 1:
        die("--solve-rate LOW HIGH must satisfy 0 <= LOW <= HIGH <= 1")
    if args.group_size < 2:
        die("--group-size must be 2 or more: A compares the samples of a prompt with each other")
    if args.minibatches > args.prompts_per_step:
        die(f"--prompts-per-step must be at least --minibatches, {args.minibatches}")
    if not args.model and args.dataset != Args.dataset:
        die("--dataset needs --model: the toy model only knows the toy problems")
    if args.stop_at and not args.eval_dataset:
        die("--stop-at needs --eval-dataset: it looks at the evaluation accuracy")
    if args.gpu_memory > 1:
        die("--gpu-memory is a share of the GPU, at most 1")
    unborn = {"lock", "config.json", "traceback.txt", "step-000000.partial"}  # got nowhere
    if args.out and not saved:
        if Path(args.out).is_file() or {path.name for path in Path(args.out).glob("*")} - unborn:
            die(f"--out {args.out} is a file or holds another run: a new directory, or --resume")
    return args


def config_of(resume):
    """-> the directory and the flags of the run to go on with."""
    try:
        runs = [Path(resume)] if resume else Path("runs").glob("*/step-*")
        out = max(runs, key=os.path.getmtime)
        out = out.parent if out.name.startswith("step-") else out  # a checkpoint, even a broken one
        config = json.loads((out / "config.json").read_text())
        anew = {"resume", "out", "trust_remote_code", "allow_pickle"}  # never from a file
        names = [f.name for f in fields(Args) if f.name in config and f.name not in anew]
        # every config names its method: another program's file is a KeyError
        return str(out), {name: config[name] for name in names} | dict(method=config["method"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        die(f"--resume: no run in {resume or 'runs/'} ({error})")


# ------------------------------------------------------------------------------ task and reward


@dataclass
class Problem:
    text: str  # the prompt as the model sees it
    ids: list  # the same as token ids: x
    gold: str  # the right answer


# (prompt column, answer column): DAPO-Math, GSM8K, MATH-500, MATH, and the plainest of all
SHAPES = [("prompt", "reward_model"), ("question", "answer"), ("problem", "answer")]
SHAPES += [("problem", "solution"), ("prompt", "answer")]


def read_rows(source):
    """The rows of a file or of a hub data set, as dicts."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(source).suffix)
    try:
        if kind:
            return load_dataset(kind, data_files=source, split="train")
        name, config, part, *_ = *source.split(":"), "", ""
        return load_dataset(name, config or None, split=part or "train")
    except Exception as error:
        die(f"cannot read {source}: {error.__cause__ or error} (no hub? --dataset takes files)")


def load_problems(source, args, tokenizer, grader):
    """Each prompt once, with its answer. What is left out is counted and said."""
    rows = read_rows(source)
    named, columns = (args.prompt_column, args.answer_column), rows.column_names
    shape = next((s for s in ([named] if any(named) else SHAPES) if {*s} <= {*columns}), None)
    if shape is None:
        die(f"{source} has the columns {columns}: name yours by --prompt-column, --answer-column")
    dropped, golds_of, problems = Counter(), {}, []
    for row in rows:
        question, gold = (row.get(column) for column in shape)
        gold = gold.get("ground_truth") if isinstance(gold, dict) else gold
        gold = gold if isinstance(gold, (str, int, float)) else ""  # null, a list
        if not question or not isinstance(question, (str, list)) or not str(gold).strip():
            dropped["without prompt or answer"] += 1
            continue
        if isinstance(question, str):
            text = f"{question}\n{args.instruction}" if args.instruction else question
            question = [{"role": "user", "content": text}]
        golds = golds_of.setdefault(json.dumps(question), set())
        dropped["duplicate"] += bool(golds)  # DAPO-Math-17k holds each prompt about 100 times
        golds.add(final_answer(str(gold)) or str(gold).strip())
    for question, golds in golds_of.items():
        try:
            text, ids = encode(tokenizer, json.loads(question))
        except Exception:  # messages without content, or in an order that the template refuses
            dropped["that form no prompt"] += 1
            continue
        if len(golds) > 1:
            dropped["with contradicting answers"] += 1
        elif len(ids) > args.max_prompt:
            dropped[f"longer than {args.max_prompt} tokens"] += 1
        elif not grader.same(*golds, *golds):
            dropped["whose answer the grader cannot read"] += 1
        else:
            problems.append(Problem(text, ids, *golds))
    why = ", ".join(f"{n:,} {reason}" for reason, n in dropped.items() if n) or "none"
    say(f"{source}: {len(rows):,} rows, {len(problems):,} prompts; dropped: {why}")
    return problems or die(f"{source}: no row is left to train on")


def encode(tokenizer, messages):
    """Chat template if there is one, else bare text, and BOS once: a template writes its own."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n".join(message["content"] for message in messages)
    return text, tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)


BRACED = r"[^{}]*"
for _ in range(5):  # a complete \boxed{}, with braces in braces
    BRACED = rf"(?:[^{{}}]|\{{{BRACED}\}})*"
BOXED = re.compile(rf"\\boxed\s*\{{({BRACED})\}}")
MARKED = re.compile(rf"{BOXED.pattern}|(?:answer\s*:|####)[\s*]*([^\n]+)", re.IGNORECASE)
NUMBER = re.compile(r"[+-]?\d{1,40}(\.\d{1,40}|/0*[1-9]\d{0,39})?")
UNDONE = re.compile(r"\d[\s)}\]]*([-+*/×·÷]|\\(times|cdot|div))[\s({\[]*\d")


def final_answer(text):
    """The last complete \\boxed{...}, or the line after the last "Answer:" or "####" (the next with
    text), whichever comes last; one word alone is an answer too; "" if there is none."""
    found = MARKED.findall(text)  # pairs, of which one half is empty
    answer = "".join(found[-1]) if found else text if len(text.split()) == 1 else ""
    answer = re.split(r"(?i)answer\s*:", answer)[-1]  # "#### Final answer: 4"
    answer = (BOXED.findall(answer) or [answer])[-1]  # "Answer: \boxed{4}"
    answer = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer)  # 1,234 is 1234
    return answer.strip(" $*`").removesuffix(".").strip(" $*`")


class Grader:
    """R(y) = 1 if the final answer equals the gold answer, else 0.

    Numbers are compared here. The rest goes to math-verify in a process of its own: an answer such
    as 9^{9^{9^{9}}} keeps it busy in C, where only a kill ends it.
    """

    SECONDS, CHARACTERS = 1.0, 500  # the most for an answer
    BATCH_SECONDS, MEAN_SECONDS = 60.0, 0.05  # and for n answers: the first + n * the second

    def __init__(self):
        self.worker, self.timeouts = None, 0

    def __call__(self, texts, golds):
        """B texts and B gold answers -> R (B,)"""
        deadline = time.monotonic() + self.BATCH_SECONDS + len(texts) * self.MEAN_SECONDS
        self.timeouts = 0
        pairs = zip(map(final_answer, texts), golds)
        return torch.tensor([float(self.same(*pair, deadline)) for pair in pairs])

    def same(self, answer, gold, deadline=math.inf):
        if NUMBER.fullmatch(gold):
            answer = answer.rsplit("=")[-1].strip()  # "3 + 4 = 7" is 7
            if NUMBER.fullmatch(answer):
                return Fraction(answer) == Fraction(gold)
            if UNDONE.search(answer):  # "3 + 4" repeats the question
                return False
        if not answer or len(answer) > self.CHARACTERS:
            return False
        if time.monotonic() > deadline:
            self.timeouts += 1
            return False
        if self.worker is None:
            self.start()
        with suppress(OSError, EOFError):  # the worker is gone: out of memory, or killed
            self.pipe.send((answer, gold))
            if self.pipe.poll(self.SECONDS):
                return self.pipe.recv()
            self.timeouts += 1
        self.close()
        return False

    def start(self):
        context = multiprocessing.get_context("spawn")  # forking a process full of threads may hang
        self.pipe, theirs = context.Pipe()
        self.worker = context.Process(target=judge, args=(theirs,), daemon=True)
        self.worker.start()
        theirs.close()
        try:
            self.pipe.send(("x", "x"))
            self.pipe.recv()  # the slow import is not the answer's fault
        except (OSError, EOFError):
            why = "main() needs a __main__ guard"
            raise Stop(f"the grader's process does not start ({why})") from None

    def close(self):
        if self.worker is not None:
            self.worker.kill()
            self.worker.join()
        self.worker = None


def judge(pipe):
    """The grader's process: do two LaTeX answers say the same?"""
    from math_verify import parse, verify

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    logging.disable(logging.WARNING)  # math-verify asks for the time limit that Grader keeps
    alarm = getattr(signal, "alarm", lambda seconds: None)
    with suppress(EOFError):  # the trainer is gone
        while True:
            same, sides = False, pipe.recv()
            alarm(5)  # the kernel's: what is stuck in C must not outlive a trainer that was killed
            with suppress(Exception):  # whatever math-verify stumbles over is no answer
                a, b = [parse(f"\\boxed{{{side}}}", parsing_timeout=None) for side in sides]
                same = bool(a and b and verify(b, a, timeout_seconds=None))
            alarm(0)
            pipe.send(same)


# -------------------------------------------------------------------------------------- rollout


@dataclass
class Sample:
    """One response. What the engine returns: x, y_t, and mu at the sampling temperature."""

    prompt: list  # x, token ids
    y_ids: Tensor  # (T, 1+K) int64; a sampled EOS is y_T
    logmu: Tensor  # (T, 1+K) float32
    stopped: bool  # by EOS; False: cut at max_response
    problem: Problem = None
    text: str = ""
    R: float = math.nan
    A: float = math.nan
    old: Tensor = None  # (T, 1+K) log pi_theta', once scored


def slots(y, logmu_y, top, logmu_top):
    """y (..., 1) and the top K (..., K), with log-probs -> y_ids, logmu (..., 1+K): y only once."""
    logmu_top = logmu_top.masked_fill(top == y, -INF)
    return torch.cat([y, top], -1), torch.cat([logmu_y, logmu_top], -1)


class VllmEngine:
    """vLLM in this process: token ids in, samples out."""

    def __init__(self, args, eos, K):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # push() hands tensors over
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB, on a CPU
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        warnings.filterwarnings("ignore", category=FutureWarning)
        import vllm

        set_threads, threads = torch.set_num_threads, torch.get_num_threads()
        dtype, began = args.engine_dtype.replace("auto", AUTO_DTYPE), time.perf_counter()
        self.exact = dtype == AUTO_DTYPE == "float32"  # mu and pi then agree to rounding
        gpu = dict(enable_sleep_mode=True, gpu_memory_utilization=args.gpu_memory)
        self.llm = vllm.LLM(
            args.model,
            dtype=dtype,
            seed=args.seed,
            trust_remote_code=args.trust_remote_code,
            load_format="auto" if args.allow_pickle else "safetensors",
            max_model_len=args.max_prompt + args.max_response,
            max_logprobs=max(1, K),
            logprobs_mode="processed_logprobs",  # after the temperature: the law that samples
            generation_config="vllm",  # not the model's own, which may change the sampler
            use_tqdm_on_load=False,
            distributed_executor_backend="external_launcher" if WORLD > 1 else None,
            **(gpu if DEVICE == "cuda" else dict(enforce_eager=True)),
        )
        set_threads(threads)  # LLM() keeps torch to fewer cores and replaces the function
        # what is not named keeps SamplingParams' own default: no truncation and no penalty
        self.params = partial(
            vllm.SamplingParams,
            temperature=args.temperature,
            max_tokens=args.max_response,
            stop_token_ids=eos,
            logprobs=K,
            flat_logprobs=True,
            detokenize=False,
        )
        self.K, self.asleep = K, False
        say(f"vLLM {vllm.__version__} in {dtype}, {time.perf_counter() - began:.0f} s to start")

    def push(self, model):
        """The trainer's weights, and no prefix that older weights computed. state_dict and not
        named_parameters: without the tied head in it, an engine on a CPU keeps its old copy."""
        if self.asleep:
            torch.cuda.empty_cache()
            self.llm.wake_up()
            self.asleep = False
        weights = ((name, full(w)) for name, w in model.state_dict().items())
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
        if not self.llm.reset_prefix_cache():
            raise Stop("vLLM keeps prefixes that old weights computed")

    def generate(self, prompts, n, seed):
        """P prompts (lists of token ids) -> P * n samples, the n of a prompt side by side.

        Each sample has a seed of its own, seed to seed + P * n - 1 (vLLM counts on from a prompt's
        first), so that what it draws does not depend on the company that it is computed in.
        """
        inputs = [dict(prompt_token_ids=ids) for ids in prompts]
        params = [self.params(n=n, seed=seed + n * i) for i in range(len(prompts))]
        samples = []
        for request in self.llm.generate(inputs, params, use_tqdm=False):
            for out in request.outputs:
                # per token: y_t, then the sorted top K, where y_t may stand again
                ids = torch.tensor(out.logprobs.token_ids).view(-1, 1 + self.K)
                logp = torch.tensor(out.logprobs.logprobs).view(-1, 1 + self.K)
                y_ids, logmu = slots(ids[:, :1], logp[:, :1], ids[:, 1:], logp[:, 1:])
                stopped = out.finish_reason == "stop"
                samples.append(Sample(request.prompt_token_ids, y_ids, logmu, stopped))
        if [s.prompt for s in samples[::n]] != prompts:
            raise Stop("vLLM changed the prompts' token ids")
        if DEVICE == "cuda":  # lend the memory to the trainer; the weights wait on the host
            self.llm.sleep(level=1)
            self.asleep = True
        return samples


class HfEngine:
    """The same in plain PyTorch, on the trainer's own module: slow, runs anywhere, and the oracle
    of the tests."""

    ROWS = 256  # sampled at once

    def __init__(self, args, eos, K):
        self.args, self.eos, self.K = args, torch.tensor(eos), K
        self.exact = AUTO_DTYPE == "float32"

    def push(self, model):
        self.model = model
        if WORLD > 1:  # the trainer's own module has a part of the weights only
            from transformers import AutoModelForCausalLM

            trust = dict(trust_remote_code=self.args.trust_remote_code)
            self.model = AutoModelForCausalLM.from_config(model.config, **trust).to(DEVICE)
            self.model.load_state_dict({name: full(w) for name, w in model.state_dict().items()})

    def generate(self, prompts, n, seed):
        self.model.eval()  # gradient checkpointing allows no cache in training mode
        samples = []
        for part in chunks(len(prompts), max(1, self.ROWS // n)):
            samples += self.generate_part(prompts[part], n, seed + n * part.start)
        self.model.train()
        return samples

    @torch.no_grad()
    def generate_part(self, prompts, n, seed):
        rows, P = [ids for ids in prompts for _ in range(n)], max(map(len, prompts))
        # a stream of numbers a prompt, drawn for all its n rows until the last has ended
        draws = [torch.Generator(DEVICE).manual_seed(seed + n * i) for i in range(len(prompts))]
        pad = lambda row, value: [0] * (P - len(row)) + value  # on the left: all end together
        ids = torch.tensor([pad(row, row) for row in rows], device=DEVICE)  # (B, P)
        attend = torch.tensor([pad(row, [1] * len(row)) for row in rows], device=DEVICE)
        alive, cache, steps = torch.ones_like(ids[:, 0], dtype=torch.bool), None, []
        while alive.any() and len(steps) < self.args.max_response:
            position = (attend.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            with autocast():
                more = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
                out = self.model(ids, attention_mask=attend, position_ids=position, **more)
            cache = out.past_key_values
            logp = (out.logits[:, -1].float() / self.args.temperature).log_softmax(-1)  # (B, V)
            clocks = [torch.empty_like(logp[:n]).exponential_(generator=draw) for draw in draws]
            y = (logp.exp() / torch.cat(clocks)).argmax(-1, keepdim=True)  # first to ring: exact
            top = logp.topk(self.K)
            steps.append((*slots(y, logp.gather(-1, y), top.indices, top.values), alive))
            alive = alive & ~torch.isin(y[:, 0], self.eos.to(DEVICE))
            ids, attend = y, torch.cat([attend, torch.ones_like(y)], -1)
        y_ids, logmu, valid = (torch.stack(x, 1).cpu() for x in zip(*steps))
        rest = zip(rows, y_ids, logmu, valid.sum(-1), alive.tolist())
        return [Sample(row, y[:T].clone(), lp[:T].clone(), not cut) for row, y, lp, T, cut in rest]


# === ALGORITHM === from rewards to the loss: pure functions, all that another trainer needs =======
INF = math.inf

# ---------------------------------------------------------------------------------- advantages


def group_advantages(rewards, group_size, normalize_std=False):
    """A = R - mean of the group, and exactly 0 in a group that agrees. theory.md#loss

    rewards (B,), the group_size >= 2 samples of a prompt side by side -> A (B,) float32.
    normalize_std divides by the group's population standard deviation (GRPO); the paper does not.
    Raises ValueError for groups of one and for rewards that are not finite.
    """
    R = torch.as_tensor(rewards, dtype=torch.float64)
    if group_size < 2 or len(R) % group_size:
        raise ValueError(f"{len(R)} rewards do not form groups of {group_size} (2 or more)")
    if not R.isfinite().all():
        raise ValueError("a reward is not finite")
    R = R.view(-1, group_size)
    A = R - R.mean(-1, keepdim=True)
    if normalize_std:
        A = A / R.std(-1, correction=0, keepdim=True).clamp_min(1e-12)
    # the mean of equal rewards may miss them by one ulp, which the division would blow up
    return A.masked_fill((R == R[:, :1]).all(-1, keepdim=True), 0.0).flatten().float()


# ---------------------------------------------------------------------------------- divergence
# Each distance takes the probabilities (..., 1+K) of an anchor (mu, or pi_theta') and of pi on the
# same tokens, slot 0 = y_t, and returns (...). Pooling all other tokens into one outcome can only
# lower TV and KL, so tv and kl bound the full divergence from below. theory.md#coarsening

RESOLUTION = 1e-7  # of a float32 softmax beside 1: a smaller 1 - sum(p) is rounding


def with_rest(p):
    """(..., 1+K) -> (..., 2+K): the mass of the unlisted tokens appended. theory.md#numerics"""
    return torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1).clamp(RESOLUTION, 1.0)


def tv(mu, pi):
    """1/2 sum |mu - pi|; with K = 0, |mu(y_t) - pi(y_t)|. theory.md#coarsening"""
    return (with_rest(mu) - with_rest(pi)).abs().sum(-1) / 2


def kl(mu, pi):
    """KL(mu || pi) in nats; with K = 0, between two Bernoullis. theory.md#coarsening"""
    mu, pi = with_rest(mu), with_rest(pi)
    return (mu * (mu / pi).log()).sum(-1)


def ratio(mu, pi):
    """|r - 1|, PPO's distance: it looks at y_t only. theory.md#ppo-clip"""
    tiny = torch.finfo(mu.dtype).tiny
    return (pi[..., 0].clamp(tiny, 1.0) / mu[..., 0].clamp(tiny, 1.0) - 1).abs()


# ------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Method:
    """Block what moves away from the anchor and is farther than delta. theory.md#methods"""

    distance: Callable = tv  # D(anchor, pi)
    delta: tuple = (INF, INF)  # radius for (A < 0, A > 0); inf: that side is never blocked
    top_k: int = 0  # K
    anchor: str = "rollout"  # mu; or "recomputed": pi_theta', one more forward a rollout
    floor: tuple = (0.0, 0.0)  # for (A < 0, A > 0); a token whose anchor is below is never blocked
    cap: float = math.exp(20)  # C; e^20 only keeps the exponential finite
    far: Callable = torch.gt  # D > delta; the minimal masks block D = delta as well

    def text(self):
        row = vars(self) | dict(distance=self.distance.__name__, far=self.far.__name__)
        return ", ".join(f"{name}={value}" for name, value in row.items())


# delta, alpha = 0.1 and K: the paper. C = 10: the default of the authors' code.
# fmt: off
METHODS = {
    "dppo-binary-tv":           Method(tv,    (0.15, 0.15)),
    "dppo-binary-kl":           Method(kl,    (0.05, 0.05)),
    "dppo-topk-tv":             Method(tv,    (0.15, 0.15), top_k=20),
    "dppo-topk-kl":             Method(kl,    (0.05, 0.05), top_k=20),
    "dppo-binary-tv-recompute": Method(tv,    (0.15, 0.15), anchor="recomputed"),
    "dppo-binary-kl-recompute": Method(kl,    (0.05, 0.05), anchor="recomputed"),
    "grpo":                     Method(ratio, (0.20, 0.28)),  # with Clip-Higher
    "minirl":                   Method(ratio, (0.20, 0.28), anchor="recomputed"),
    "minirl-tis":               Method(ratio, (0.20, 0.28), anchor="recomputed", cap=10.0),
    "pg-is":                    Method(),
    "cispo":                    Method(cap=10.0),  # the paper's PG-TIS
    "mask-0.5":                 Method(tv,    (0.50, INF), far=torch.ge),
    "mask-0.8":                 Method(tv,    (0.80, INF), far=torch.ge),
    "mask-0.5-recompute":       Method(tv,    (0.50, INF), far=torch.ge, anchor="recomputed"),
    "grpo-relax-low":           Method(ratio, (0.20, 0.28), floor=(0.1, 0.0)),
    "grpo-relax-high":          Method(ratio, (0.20, 0.28), floor=(0.0, 0.1)),
    "grpo-relax-both":          Method(ratio, (0.20, 0.28), floor=(0.1, 0.1)),
}
# fmt: on


def keep_mask(advantages, anchor, pi, method):
    """M_t, the same rule for every method. theory.md#mask

    advantages (N,); anchor and pi (N, 1+K), probabilities -> bool (N,), False = blocked.
    """
    # (N,): of a pair for (A < 0, A > 0), the one that a token's A asks for
    side = lambda pair: anchor.new_tensor(pair)[(advantages > 0).long()]
    # A > 0 raises pi(y_t): away if it is above the anchor already. A < 0: the mirror image.
    # A = 0 moves nothing.
    away = advantages.sign() * (pi[..., 0] - anchor[..., 0]) > 0
    far = method.far(method.distance(anchor, pi), side(method.delta))
    return ~(away & far & (anchor[..., 0] >= side(method.floor)))


# ---------------------------------------------------------------------------------------- loss


def policy_loss(logpi, logmu, advantages, keep, cap):
    """-M_t min(r_t, C) A log pi(y_t|s_t) for each token. theory.md#loss

    All (N,), of y_t -> (N,). M and min(r, C) are constants to the gradient, so below C it is the
    gradient of -M_t r_t A; and a token above C keeps a gradient, which clamping r itself would end.
    """
    weight = (logpi - logmu).detach().clamp(max=math.log(cap)).exp()
    return -torch.where(keep, weight, 0.0) * advantages * logpi


def log_probs(hidden, weight, temperature):
    """hidden (n, H), head weight (V, H) -> the log of the sampling law (n, V), in float32."""
    return ((hidden / temperature) @ weight.T).float().log_softmax(-1)


class HeadLoss(torch.autograd.Function):
    """sum_t token_loss(log pi)_t, where the (N, V) logits never exist at once. theory.md#head

    token_loss reads log pi at the slots only. So its gradient g there, and with it the gradient of
    the logits, scatter(g) - sum(g) softmax, are known when a chunk's forward is done: the backward
    needs no stored logits and no second forward.

    hidden (N, H), weight (V, H), y_ids (N, 1+K), token_loss(logpi (n, 1+K), rows) -> (n,).
    """

    @staticmethod
    def forward(ctx, hidden, weight, y_ids, temperature, chunk, token_loss):
        grad_hidden, total = torch.empty_like(hidden), 0.0
        dtype = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=dtype)  # bfloat16 sums would lose small terms
        for rows in chunks(len(hidden), chunk):
            logp = log_probs(hidden[rows], weight, temperature)  # (n, V)
            logpi = logp.gather(-1, y_ids[rows]).requires_grad_()  # (n, 1+K)
            with torch.enable_grad():
                loss = token_loss(logpi, rows).sum()
                (g,) = torch.autograd.grad(loss, logpi)  # (n, 1+K)
            softmax = logp.exp_()  # in place: no other (n, V) tensor beside it
            d_logits = softmax.mul_(-g.sum(-1, keepdim=True)).scatter_add_(-1, y_ids[rows], g)
            d_logits = d_logits.to(weight.dtype)
            grad_hidden[rows] = d_logits @ weight / temperature
            product = d_logits.T, hidden[rows] / temperature
            if dtype == weight.dtype:
                grad_weight.addmm_(*product)  # without a (V, H) tensor in between
            else:
                grad_weight += product[0] @ product[1]
            total += loss.detach()
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None, None


def chunks(n, size):
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


# === end of ALGORITHM ============================================================================
# ---------------------------------------------------------------------------- forward and update


def autocast():
    """On a GPU bfloat16 computes and float32 weights learn: at a learning rate of 1e-6 a bfloat16
    weight of 0.02 does not move."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def full(x):
    """All of a parameter that fully_shard() has cut up; itself, if it is whole."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gather(part):
    """A list of each rank -> one list, in the order of the ranks."""
    parts = [part] * WORLD
    if WORLD > 1:
        distributed.all_gather_object(parts, part)
    return sum(parts, [])


def shares(batches):
    """This rank's micro-batches, and whether each counts. All ranks make equally many forwards:
    a sharded model gathers its weights from all of them."""
    for i in range(0, len(batches), WORLD):
        yield batches[min(i + RANK, len(batches) - 1)], i + RANK < len(batches)


def head_inputs(model, samples):
    """-> hidden (N, H), the states that predict the response tokens of all samples; weight (V, H).

    Position t predicts token t + 1, so y_1 belongs to the last position of the prompt. Rows are
    padded on the right, where causal attention never looks; lengths say what counts, not ids.
    """
    rows = [torch.cat([torch.tensor(s.prompt), s.y_ids[:-1, 0]]) for s in samples]
    ids = pad_sequence(rows, batch_first=True)  # (B, L)
    ends = [torch.arange(len(row)) >= len(s.prompt) - 1 for s, row in zip(samples, rows)]
    valid = pad_sequence(ends, batch_first=True)  # (B, L) bool
    states = model.base_model(input_ids=ids.to(DEVICE), use_cache=False).last_hidden_state
    hidden, weight = states[valid.to(DEVICE)], model.get_output_embeddings().weight
    dtype = torch.bfloat16 if torch.is_autocast_enabled(DEVICE) else hidden.dtype
    return hidden.to(dtype), weight.to(dtype)


def at_head(model, samples, f):
    """f(hidden, weight), computed inside a method of the model, where its weights are whole."""
    return f(*head_inputs(model, samples))


def micro_batches(samples, tokens):
    """Samples of similar length, at most `tokens` padded tokens together (a longer one alone).
    Longest first: what is too large for the memory fails at once."""
    batch, length = [], lambda s: len(s.prompt) + len(s.y_ids)
    for s in sorted(samples, key=length, reverse=True):
        if batch and length(batch[0]) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(s)
    if batch:
        yield batch


def flat(samples, name, device=DEVICE):
    """One field of all samples, token after token: (N, ...)."""
    return torch.cat([getattr(s, name) for s in samples]).to(device)


def finite(name, x):
    """x, unless the run must end: a NaN distance compares as "not far" and passes every mask."""
    if not torch.as_tensor(x).isfinite().all():
        raise Stop(f"{name} is not finite; ended before the optimizer moves")
    return x


@torch.no_grad()
def score(model, samples, args):
    """Set s.old, the log-probs (T, 1+K) of the sample's slots at the current weights."""
    batches, found = [*micro_batches(samples, args.micro_batch_tokens)], []
    for batch, counts in shares(batches):
        y_ids = flat(batch, "y_ids")

        def logpi(hidden, weight):
            some = lambda rows: log_probs(hidden[rows], weight, args.temperature)
            parts = chunks(len(hidden), args.head_chunk)
            return torch.cat([some(rows).gather(-1, y_ids[rows]) for rows in parts])

        with autocast():
            old = finite("log pi", model.at_head(batch, logpi)).cpu()
        found += old.split([len(s.y_ids) for s in batch]) if counts else ()
    order = [s for rank in range(WORLD) for batch in batches[rank::WORLD] for s in batch]
    for s, old in zip(order, gather([old.clone() for old in found])):
        s.old = old.masked_fill(s.logmu == -INF, -INF)


def update(model, optimizer, samples, method, args):
    """One optimizer step -> what the mask saw, flat (N,), or None if no group has anything to say.

    One denominator for the whole minibatch, known before its first forward, so the gradient is
    the same however the minibatch is cut. Groups that agree count in it and need no forward.
    """
    tokens = sum(len(s.y_ids) for s in samples)
    denominator = tokens if args.loss_agg == "token-mean" else len(samples) * args.max_response
    batches = [*micro_batches([s for s in samples if s.A != 0], args.micro_batch_tokens)]
    seen = []
    for batch, counts in shares(batches):
        # fully_shard() averages over the ranks; a forward that is made only because other ranks
        # make one weighs 1 / inf = 0
        share = denominator / WORLD if counts else INF
        y_ids, logmu = flat(batch, "y_ids"), flat(batch, "logmu")  # (N, 1+K)
        anchor = (flat(batch, "old") if method.anchor == "recomputed" else logmu).exp()
        A = torch.cat([torch.full((len(s.y_ids),), s.A) for s in batch]).to(DEVICE)  # (N,)
        of_batch = logmu, anchor, A

        def token_loss(logpi, rows):  # of the n tokens in `rows`: logpi (n, 1+K) -> (n,)
            logmu, anchor, A = (x[rows] for x in of_batch)
            pi = finite("log pi", logpi.detach()).masked_fill(logmu == -INF, -INF).exp()
            D = finite("D", method.distance(anchor, pi))
            keep = keep_mask(A, anchor, pi, method)
            if counts:
                saw = dict(A=A, logmu=logmu[:, 0], logpi=logpi[:, 0].detach(), D=D, keep=keep)
                seen.append({name: x.cpu() for name, x in saw.items()})
            return policy_loss(logpi[:, 0], logmu[:, 0], A, keep, method.cap) / share

        how = (y_ids, args.temperature, args.head_chunk, token_loss)
        with autocast():
            loss = model.at_head(batch, lambda *head: HeadLoss.apply(*head, *how))
        loss.backward()
    if not batches:
        return None
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    norm = finite("the norm of the gradient", full(norm)).cpu()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seen = gather(seen)
    return {name: torch.cat([s[name] for s in seen]) for name in seen[0]} | dict(norm=norm[None])


# -------------------------------------------------------------------------------------- one step


class Stages(dict):
    """Seconds of each stage; `now` names the running one, should it fail."""

    now, since = "start", time.perf_counter()

    def enter(self, stage):
        t = time.perf_counter()
        self[self.now] = self.get(self.now, 0.0) + t - self.since
        self.now, self.since = stage, t


@dataclass
class Run:
    """What the loop works on. OUT/step-N holds all of it that changes."""

    args: Args
    out: Path
    signals: object
    tokenizer: object
    grader: Grader
    method: Method
    problems: list
    held_out: list  # of --eval-dataset; the training problems if that is "train"
    engine: object
    model: object
    optimizer: object
    tracker: object  # or None
    claimed: object  # an open file
    step: int  # rollouts done
    saved: int  # what the newest checkpoint holds
    stages: Stages = field(default_factory=Stages)


def seed_of(args, purpose, step=0):
    """What a step draws depends on --seed and the step alone."""
    return random.Random(f"{args.seed} {purpose} {step}").getrandbits(32)


def problems_of(problems, step, args):
    """The prompts of a step: epoch after epoch, each in an order of its own."""
    n, first, P = len(problems), step * args.prompts_per_step, args.prompts_per_step
    epochs = range(first // n, (first + P - 1) // n + 1)
    orders = [random.Random(seed_of(args, "epoch", e)).sample(problems, n) for e in epochs]
    return sum(orders, [])[first % n :][:P]


def rollout(run, problems, n, seed):
    """y ~ mu at the model's weights, and R(y) -> n samples a problem, side by side."""
    run.stages.enter("push")
    run.stages.clear()  # the seconds of a row count from here
    run.engine.push(run.model)
    run.stages.enter("rollout")
    first, last = (len(problems) * rank // WORLD for rank in (RANK, RANK + 1))
    mine = problems[first:last]
    samples = run.engine.generate([p.ids for p in mine], n, seed + n * first)
    for s in samples:
        finite("log mu", s.logmu[:, 0])
    run.stages.enter("grade")
    for i, s in enumerate(samples):
        s.problem = mine[i // n]
        s.text = run.tokenizer.decode(s.y_ids[:, 0], skip_special_tokens=True)
    R = run.grader([s.text for s in samples], [s.problem.gold for s in samples])
    for s, reward in zip(samples, R.tolist()):
        s.R = reward
    return gather(samples)


def check_engine(fresh, exact):
    """mu is mu only if the trainer agrees at the same weights. -> |log pi - log mu| (N,), in nats

    Otherwise the run ends: stale weights, a shifted token, another temperature, a cached prefix.
    With float32 on both sides (exact) healthy engines are 1e-5 off at most; bfloat16 is some
    hundredths off on average, rare tokens much more, so that there the mean is bounded.
    """
    gap = (flat(fresh, "old")[:, 0] - flat(fresh, "logmu")[:, 0]).abs()
    found, bound = (gap.max(), 1e-3) if exact else (gap.mean(), 0.15)
    if not found <= bound:
        raise Stop(
            f"engine and trainer differ by {found:.2g} nats (bound {bound}) on a fresh rollout: "
            "other weights, another temperature, or model code that differs between the two"
        )
    return gap


def metrics(samples, R, fresh, gap, seen, group_size):
    """One row of metrics.jsonl; README.md says what each number tells."""
    mean = lambda x: torch.as_tensor(x, dtype=torch.float64).mean().item()
    rate = R.view(-1, group_size).mean(-1)  # (P,)
    logmu = flat(samples, "logmu", "cpu")[:, 0]
    gap_prob = (flat(fresh, "old")[:, 0].exp() - flat(fresh, "logmu")[:, 0].exp()).abs()
    row = dict(reward=mean(R), solved=mean(rate > 0), informative=mean((rate > 0) & (rate < 1)))
    row |= dict(length=len(logmu) / len(samples), truncated=mean([not s.stopped for s in samples]))
    row |= dict(entropy=-mean(logmu), updates=len(seen))  # E[-log mu(y_t)] is the mean entropy
    spread = dict(gap_log=gap, gap=gap_prob)
    if seen:
        A, logmu, logpi, D, keep, norm = (torch.cat([s[name] for s in seen]) for name in seen[0])
        last = (seen[-1]["logpi"].exp() - seen[-1]["logmu"].exp()).abs()
        bad = (A < 0) & (logmu.exp() - logpi.exp() >= 0.5)
        spread |= dict(D=D, gap_last=last)
        row |= dict(blocked=mean(~keep), bad_updates=mean(bad), grad_norm=mean(norm))
        row |= dict(ratio_max=(logpi - logmu).max().exp().item())
        row |= dict(blocked_pos=mean(~keep[A > 0]), blocked_neg=mean(~keep[A < 0]))
    for name, x in spread.items():
        row |= {f"{name}_mean": mean(x), f"{name}_max": x.max().item()}
    return row


def solve_rates(run, problems, n, seed):
    """Mean reward of n samples a problem (P,); a thousand problems at a time, for the memory."""
    parts = chunks(len(problems), 1024)
    some = lambda part: rollout(run, problems[part], n, seed + n * part.start)
    return torch.tensor([s.R for part in parts for s in some(part)]).view(-1, n).mean(-1)


def train_step(run, samples):
    """Everything after the rollout -> its row of metrics."""
    args, G, n = run.args, run.args.group_size, run.args.minibatches
    run.stages.enter("score")

    # 1. advantages
    R = torch.tensor([s.R for s in samples])  # (B,)
    A = group_advantages(R, G, args.normalize_std)
    for s, advantage in zip(samples, A.tolist()):
        s.A = advantage

    # 2. pi_theta' at the rollout's weights: of all samples if the method is anchored there, else
    #    of 16 to 31, which is enough to see that engine and trainer agree
    all_of_them = run.method.anchor == "recomputed"
    fresh = samples[:: 1 if all_of_them else max(1, len(samples) // 16)]
    score(run.model, fresh, args)
    gap = check_engine(fresh, run.engine.exact)

    # 3. minibatches of whole groups, one optimizer step each
    run.stages.enter("train")
    cuts, seen = [len(samples) // G * i // n * G for i in range(n + 1)], []
    for a, b in zip(cuts, cuts[1:]):
        if stats := update(run.model, run.optimizer, samples[a:b], run.method, args):
            seen.append(stats)
        if run.signals.agreed():  # the rest of the rollout is given up
            break
    run.step += 1
    run.stages.enter("record")

    timeouts = sum(gather([run.grader.timeouts]))
    row = metrics(samples, R, fresh, gap, seen, G) | dict(grader_timeouts=timeouts)
    row |= dict(tokens_per_s=row["length"] * len(samples) / sum(run.stages.values()))
    return row | {f"s_{stage}": seconds for stage, seconds in run.stages.items()}


# --------------------------------------------------------------------------------- nothing is lost
# OUT/step-000020 is a model directory in float32 and trainer.pt. All that is random derives from
# --seed and the step, so weights, optimizer, problems and step are what there is to restore.


class Signals:
    """SIGINT, SIGTERM or SIGHUP ends the run: at once, or after `with signals:`, so that no
    minibatch, log or checkpoint is cut in the middle. A second one kills."""

    def __init__(self):
        self.got, self.held = 0, WORLD > 1  # ranks must stop at the same place
        numbers = [n for n in signal.Signals if n.name in ("SIGINT", "SIGTERM", "SIGHUP")]
        before = {n: signal.getsignal(n) for n in numbers}
        if before.get(getattr(signal, "SIGHUP", None)) is signal.SIG_IGN:  # nohup
            del before[signal.SIGHUP]
        self.before = before
        self.set(dict.fromkeys(self.before, self.handle))

    def set(self, handlers):
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def handle(self, number, frame):
        self.set(dict.fromkeys(self.before, signal.SIG_DFL))
        self.got = number
        if not self.held:
            raise KeyboardInterrupt

    def __enter__(self):
        self.held = True

    def __exit__(self, error, *_):
        self.held = WORLD > 1
        if not error and self.agreed():
            raise KeyboardInterrupt

    def agreed(self):
        """What this rank or another got: 0 or the signal's number."""
        self.got = max(gather([self.got]))
        return self.got


def sync(path):
    if os.name == "posix":
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


@contextmanager
def whole(path):
    """A file or directory that appears under its name only when all of it is on the disk."""
    partial = Path(f"{path}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    for part in [*partial.rglob("*"), partial]:
        sync(part)
    os.replace(partial, path)
    sync(path.parent)


def checkpoints(out):
    """The newest first."""
    return sorted(out.glob("step-" + "[0-9]" * 6), reverse=True)


def save(run):
    from torch.distributed.checkpoint import state_dict as sharded

    if run.saved == run.step:
        return
    run.stages.enter("save")
    whole_model = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sharded.get_model_state_dict(run.model, options=whole_model)
    state = dict(step=run.step, problems=[asdict(p) for p in run.problems], optimizer=None)
    if run.optimizer.state:
        state["optimizer"] = sharded.get_optimizer_state_dict(
            run.model, run.optimizer, options=whole_model
        )
    if RANK == 0:
        once = {name for name, _ in (*run.model.named_parameters(), *run.model.named_buffers())}
        weights = {name: w for name, w in weights.items() if name in once}  # a tied head is not
        for name, w in weights.items():
            finite(name, w)  # a checkpoint is a good one
        with whole(run.out / f"step-{run.step:06}") as new:
            run.model.save_pretrained(new, state_dict=weights)
            run.tokenizer.save_pretrained(new)
            torch.save(state, new / "trainer.pt")
        for old in checkpoints(run.out)[run.args.keep :]:
            os.replace(old, f"{old}.partial")  # half deleted it is no checkpoint
            shutil.rmtree(f"{old}.partial")
    run.saved = run.step


def newest(out):
    """The newest checkpoint that reads whole. What does not is put aside, and said."""
    from safetensors import safe_open

    for path in out.glob("step-*.partial"):
        say(f"{path} was never finished: removed")
        shutil.rmtree(path)
    for path in checkpoints(out):
        try:
            for weights in path.glob("*.safetensors"):
                safe_open(weights, "pt")
            torch.load(path / "trainer.pt", "cpu", weights_only=True, mmap=True)
            return path
        except Exception as error:
            say(f"{path} cannot be read ({error}): put aside as {path}.unreadable")
            os.replace(path, f"{path}.unreadable")
    die(f"--resume: no checkpoint in {out}: the run ended before its first; start it again")


def claim(out):
    """Make the directory, for this process alone. The kernel forgets the lock when it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / "lock", "w") if RANK == 0 else None
    except OSError as error:
        die(f"--out {out}: {error}")
    if file and importlib.util.find_spec("fcntl"):  # not on Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            die(f"another process runs in {out}")
    return file


def rewind(path, step):
    """A log without the rows of `step` and later, which are done again, and without a torn one."""
    if RANK:
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        with suppress(ValueError):
            kept += [line] if json.loads(line)["step"] < step else []
    with whole(path) as new:
        new.write_text("".join(kept))


# ----------------------------------------------------------------------------------------- start


def effective_method(args, vocabulary=INF):
    """The row of METHODS, with what the command line overrides."""
    if args.method not in METHODS:
        die(f"--method {args.method}: choose from {', '.join(METHODS)}")
    row = METHODS[args.method]
    low = args.delta_low or args.delta or row.delta[0]
    high = args.delta_high or args.delta or row.delta[1]
    # a row's K ends at the vocabulary: all tokens, the exact divergence
    K = min(row.top_k, vocabulary) if args.top_k is None else args.top_k
    if K and row.distance is ratio:
        die(f"--top-k: the distance of {args.method}, |r - 1|, looks at y_t only")
    if K > vocabulary:
        die(f"--top-k {K} exceeds the model's vocabulary of {vocabulary}")
    return replace(row, delta=(low, high), top_k=K, cap=args.is_cap or row.cap)


def load_tokenizer(args):
    """-> config, tokenizer, EOS ids; refuses what could not be trained."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        kwargs = dict(trust_remote_code=args.trust_remote_code)
        config = AutoConfig.from_pretrained(args.model, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(args.model, **kwargs)
    except Exception as error:
        die(f"--model {args.model}: {error}")
    if Path(args.model).is_dir() and not [*Path(args.model).glob("*.safetensors")]:
        if not args.allow_pickle:
            die(f"{args.model} holds no .safetensors; --allow-pickle takes other files, if trusted")
    try:
        eos = GenerationConfig.from_pretrained(args.model).eos_token_id
    except OSError:
        eos = getattr(config, "eos_token_id", None)
    eos = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:  # a turn's last token ends a response too: <|im_end|> and its like
        turns = [dict(role="user", content="?"), dict(role="assistant", content="!")]
        tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("!")[2]
        last = tokenizer.encode(tail, add_special_tokens=False)[:1]
        eos |= {*last} & {*tokenizer.all_special_ids}
    if not eos:
        die(f"--model {args.model} has no end-of-sequence token: no response could end")
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or INF
    if args.max_prompt + args.max_response > positions:
        die(f"--max-prompt plus --max-response exceed the model's {positions} positions")
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(text_config, key, None) not in (None, 1, 1.0):
            die(f"{args.model} bends its logits ({key}), which log_probs() does not: not supported")
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)  # pi is what a forward pass says, every time the same
    return config, tokenizer, sorted(eos)


def load_model(args, config, eos):
    from transformers import AutoModelForCausalLM, GenerationConfig

    kwargs = dict(trust_remote_code=args.trust_remote_code, config=config)
    kwargs |= dict(use_safetensors=None if args.allow_pickle else True)
    try:  # float32: the master weights
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **kwargs)
    except Exception as error:
        die(f"--model {args.model}: {error}")
    # many a model brings a generation config that transformers loads but refuses to save
    model.generation_config = GenerationConfig(eos_token_id=eos)
    if DEVICE == "cuda":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    model.at_head = MethodType(at_head, model.to(DEVICE).train())
    if WORLD > 1:  # weights, gradients and Adam's state are cut up over the ranks
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for part in (*model.base_model.layers, model):
            fully_shard(part)
        register_fsdp_forward_method(model, "at_head")
    return model


def load_engine(args, eos, K):
    if args.engine != "hf":
        try:
            return VllmEngine(args, eos, K)
        except Exception as error:
            if args.engine == "vllm" or not isinstance(error, ImportError) and DEVICE == "cuda":
                die(f"vLLM does not start: {error} (see README.md, or use --engine hf)", 1)
            say(f"vLLM does not run here ({error}): sampling with plain PyTorch (--engine hf)")
    if args.engine_dtype not in ("auto", AUTO_DTYPE):
        die(f"--engine hf samples in the trainer's {AUTO_DTYPE}: leave out --engine-dtype")
    return HfEngine(args, eos, K)


def report(args, method, config, tokenizer, eos, problems, out):
    """What is about to run, before the slow part, and a line for all that looks like a mistake."""
    from transformers import AutoModelForCausalLM, __version__

    try:
        with torch.device("meta"):  # sizes without weights
            trust = args.trust_remote_code
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except ValueError as error:
        die(f"--model {args.model} is no causal language model: {error}")
    if WORLD > 1 and not hasattr(model.base_model, "layers"):
        die(f"{args.model} has no list of layers to cut up over ranks: run it in one process")
    N, row = sum(p.numel() for p in model.parameters()), METHODS[args.method]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    chat = "chat template" if tokenizer.chat_template else "no chat template: plain text prompts"
    source = "unchanged" if method == row else "with overrides"
    say(f"{args.model}: {N:,} parameters in float32, tied head: {tied}, EOS {eos}, {chat}")
    say(f"--method {args.method}: {method.text()} ({source})")
    say(f"torch {torch.__version__}, transformers {__version__}, {DEVICE}, {AUTO_DTYPE} compute")
    P, radii = args.prompts_per_step, [*zip(method.delta, row.delta)]
    free, needed = shutil.disk_usage(out).free / 1e9, 12 * N * (args.keep + 1) / 1e9
    # fmt: off
    for suspicious, text in [
        (any(old < INF and not old / 3 <= new <= old * 3 for new, old in radii),
         f"delta {method.delta} is far from the row's {row.delta}: distances differ in scale"),
        (args.minibatches == 1 and min(method.delta) < INF,
         "with --minibatches 1 D is only the mismatch, so the mask hardly fires"),
        (args.temperature != 1, "at a temperature other than 1, mu is not the model's own law"),
        (len(problems) < P, f"{len(problems)} prompts for --prompts-per-step {P}: some repeat"),
        (free < needed, f"{free:.1f} GB are free in {out}; checkpoints take {needed:.1f} at most"),
    ]:
        if suspicious:
            say(f"warning: {text}")
    # fmt: on


def start(args, signals):
    """All that can be wrong with the input comes first, then the engine's slow start -> Run."""
    from torch.distributed.checkpoint import state_dict as sharded

    effective_method(args)  # for typos; once more when the vocabulary is known
    name = f"{args.method}-{Path(args.model).name or 'toy'}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = gather([Path(args.out or f"runs/{name}-{os.getpid()}")])[0]  # rank 0's, for all
    grader, tracker, state = Grader(), None, {}
    if not args.model:
        from toy import lm

        say("no --model: the toy model of toy/lm.py, made once and kept")
        args.model, args.dataset = map(str, lm.make(out.parent / "toy-base"))
    flags = asdict(args)  # before a checkpoint takes the model's place
    try:
        if args.tracker != "none" and RANK == 0:
            tracker = importlib.import_module(args.tracker)
    except ImportError:
        die(f"--tracker {args.tracker} is not installed: pip install {args.tracker}")
    if args.resume:
        claimed = claim(out)  # before another process adds to what is read here
        args.model = str(gather([newest(out)] if RANK == 0 else [])[0])
        state = torch.load(Path(args.model, "trainer.pt"), "cpu", weights_only=True)
        say(f"--resume: from {args.model}")
    config, tokenizer, eos = load_tokenizer(args)
    method = effective_method(args, config.get_text_config().vocab_size)
    load = lambda name: gather(load_problems(name, args, tokenizer, grader) if RANK == 0 else [])
    problems = [Problem(**p) for p in state.get("problems", ())] or load(args.dataset)
    held_out = load(args.eval_dataset) if args.eval_dataset not in ("", "train") else None
    if not args.resume:
        claimed = claim(out)  # now that the input is known to be good
    report(args, method, config, tokenizer, eos, problems, out)

    engine = load_engine(args, eos, method.top_k)  # first: it measures the free memory
    model = load_model(args, config, eos)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay)
    if state.get("optimizer"):
        options = sharded.StateDictOptions(full_state_dict=True)
        sharded.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        for group in optimizer.param_groups:
            group.update(lr=args.lr, weight_decay=args.weight_decay)
    if tracker:
        tracker.init(project="dppo", name=out.name, config=flags)
    if RANK == 0:  # now that engine and model stand: a failed start leaves no flags behind
        with whole(out / "config.json") as new:
            new.write_text(json.dumps(flags, indent=1))
    return Run(
        args, out, signals, tokenizer, grader, method, problems, held_out, engine, model, optimizer,
        tracker, claimed, step=state.get("step", 0), saved=state.get("step", -1),
    )  # fmt: skip


# -------------------------------------------------------------------------------------- the loop


def keep_solvable(run):
    """The problems that the model solves neither too rarely nor too often: the sanity test."""
    (low, high), n = run.args.solve_rate, run.args.solve_rate_samples
    if (low, high) == (0.0, 1.0):
        return run.problems
    rates = solve_rates(run, run.problems, n, seed_of(run.args, "rates"))
    kept = [p for p, rate in zip(run.problems, rates.tolist()) if low <= rate <= high]
    say(f"solve rate {rates.mean():.3f}; {len(kept):,} of {len(rates):,} in [{low}, {high}]")
    return kept or die("--solve-rate keeps no prompt: widen it or take other problems")


def train(run):
    """The loop, from run.step on: rollout, train, record, save -> the last row."""
    args = run.args
    with tqdm(total=args.steps, initial=run.step, unit="step", disable=RANK > 0) as bar:
        while True:
            step, row = run.step, dict(step=run.step)
            if args.eval_dataset and (step % args.eval_every == 0 or step == args.steps):
                asked, seed = run.held_out or run.problems, seed_of(args, "eval", step)
                row["accuracy"] = solve_rates(run, asked, args.eval_samples, seed).mean().item()
                say(f"step {step}: evaluation accuracy {row['accuracy']:.3f}")
            if step >= args.steps or row.get("accuracy", -1) >= (args.stop_at or INF):
                return row
            chosen, seed = problems_of(run.problems, step, args), seed_of(args, "rollout", step)
            samples = rollout(run, chosen, args.group_size, seed)
            with run.signals:
                row |= train_step(run, samples)
                record(run, row, samples[:: max(1, len(samples) // 3)][:3])
                if run.step % args.save_every == 0:
                    save(run)
            bar.update()
            bar.set_postfix_str(
                f"reward {row['reward']:.3f}, blocked {row.get('blocked', 0.0):.2%}, mismatch "
                f"{row['gap_log_mean']:.0e}, {row['tokens_per_s']:.0f} tok/s"
            )


def record(run, row, shown=()):
    """One line of metrics, a few graded samples; those of the first step go to the screen too."""
    if RANK:
        return
    with open(run.out / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    with open(run.out / "samples.jsonl", "a") as file:
        for s in shown:
            what = dict(prompt=s.problem.text, response=s.text, gold=s.problem.gold, R=s.R)
            file.write(json.dumps(dict(step=row["step"]) | what) + "\n")
            if row["step"] == 0:
                say(json.dumps(what))
    if row.get("updates") == 0:
        said = f"step {row['step']}: each group agrees (reward {row['reward']:.3f}): no update"
        say(f"warning: {said}")
    if run.tracker:
        run.tracker.log(row, step=row["step"])


def summary(out, seconds):
    """The table at the end. before and after: evaluations, or else the reward of 5 steps."""
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    steps = [row for row in rows if "reward" in row]
    mean = lambda name, rows: sum(row.get(name, 0.0) for row in rows) / max(1, len(rows))
    ends = [row["accuracy"] for row in rows if "accuracy" in row]
    ends = ends or [mean("reward", steps[:5]), mean("reward", steps[-5:])]
    print(f"{'before':>8}{'after':>8}{'mismatch':>10}{'blocked':>9}{'steps':>7}{'time':>8}")
    print(
        f"{ends[0]:>8.3f}{ends[-1]:>8.3f}{mean('gap_log_mean', steps):>10.0e}"
        f"{mean('blocked', steps):>9.2%}{len(steps):>7}{seconds:>7.0f}s"
    )
    stages = [key for key in (steps[-1] if steps else ()) if key.startswith("s_")]
    print("seconds a step:", ", ".join(f"{s[2:]} {mean(s, steps):.3f}" for s in stages))
    print(f"metrics and samples: {out}; the trained model: {checkpoints(out)[0]}")


def main(argv=None):
    began, signals, run, row = time.perf_counter(), Signals(), None, {}
    if WORLD > 1 and not distributed.is_initialized():
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        patience = timedelta(hours=2)  # rank 0 may save for long
        distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo", timeout=patience)
    try:
        run = start(parse_args(argv), signals)
        if not run.args.resume:
            run.problems = keep_solvable(run)
            save(run)  # a disk that is too small says so now
        for log in ("metrics.jsonl", "samples.jsonl"):
            rewind(run.out / log, run.step)
        with suppress(KeyboardInterrupt):
            row = train(run)
        signals.held = True
        save(run)
        if "accuracy" in row:  # of the final weights
            record(run, row)
        run.grader.close()
        if run.tracker:
            run.tracker.finish()
    except KeyboardInterrupt:
        die("stopped while starting", 128 + signals.got)
    except Exception as error:
        where = f"step {run.step}, {run.stages.now}" if run else "while starting"
        if not isinstance(error, Stop):
            file = (run.out if run else Path(tempfile.gettempdir())) / "traceback.txt"
            with suppress(OSError):
                file.write_text(traceback.format_exc())
            error = f"{type(error).__name__}: {error} ({file})"
        kept = "no checkpoint yet"
        if run and run.saved >= 0:
            if WORLD == 1 and run.stages.now not in ("train", "save"):  # the weights are good
                with suppress(Exception):
                    save(run)
            kept = f"{checkpoints(run.out)[0]} is kept, --resume {run.out} goes on"
        die(f"{where}: {error}; {kept}", 1)
    finally:
        signals.set(signals.before)
        if run and run.claimed:
            run.claimed.close()
    if signals.got:
        name = signal.Signals(signals.got).name
        die(f"{name} after step {run.step}; --resume {run.out} goes on", 128 + signals.got)
    if RANK == 0:
        summary(run.out, time.perf_counter() - began)


if __name__ == "__main__":
    main()
