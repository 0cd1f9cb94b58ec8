"""The paper's comparison in small: dppo.py itself, on the toy model, for many methods and seeds.

    python -m toy.study --methods dppo-binary-tv,pg-is --seeds 1 --steps 20      minutes
    python -m toy.study --methods stability,relaxed --lrs 3e-4 --steps 200       an hour

The commands of the committed data are in toy/README.md.

Each run is dppo.main(), with one thing changed: the engine samples from weights that differ from
the trainer's, as --engine says. A run that is in --out already is not repeated, so the study can be
stopped at any time. A run is one line of JSON: its settings, and a list over the steps for each of
SERIES. What dppo.py itself stops (a NaN, an engine too far off) ends its lists there.

Machines whose processors round differently train different base models. A row therefore says how
many `problems` its base model had to learn from, and runs of different counts are not one sample.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process a core

import torch

import dppo
from toy import lm

DPPO = "dppo-binary-tv dppo-binary-kl".split()
STABILITY = DPPO + "grpo cispo pg-is minirl minirl-tis".split() + [m + "-recompute" for m in DPPO]
BAD = "mask-0.5 mask-0.8 mask-0.5-recompute".split()
RELAXED = "grpo-relax-low grpo-relax-high grpo-relax-both".split()
TOP_K = [f"dppo-binary-tv --top-k {K}" for K in (1, 5, 14)]  # 14: the whole vocabulary
LISTS = {"stability": STABILITY, "bad": BAD, "relaxed": RELAXED, "top-k": TOP_K}
SERIES = "reward entropy gap_log_mean gap_mean gap_last_mean blocked bad_updates ratio_max".split()
SERIES += ["grad_norm"]
RUN = "method lr engine seed steps problems".split()  # what tells one run from another


class Quantised(dppo.HfEngine):
    """Samples from the trainer's weights rounded to a few bits, row by row, as quantised engines
    do. The embedding, which is the head as well, and the norms stay as they are."""

    def __init__(self, args, eos, K, bits):
        super().__init__(args, eos, K)
        self.exact, self.largest = False, 2 ** (bits - 1) - 1

    def push(self, model):
        from transformers import AutoModelForCausalLM

        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_config(model.config)
        self.model.load_state_dict(model.state_dict())
        with torch.no_grad():
            for name, w in self.model.named_parameters():
                if w.ndim == 2 and "embed" not in name:
                    scale = w.abs().amax(1, keepdim=True) / self.largest
                    w.copy_((w / scale).round() * scale)


def bfloat16(args, eos, K):
    return dppo.VllmEngine(dppo.replace(args, engine_dtype="bfloat16"), eos, K)


ENGINES = {"same": dppo.HfEngine, "vllm-bf16": bfloat16}  # how it differs from the float32 trainer
for bits in (8, 6, 5, 4):
    ENGINES[f"{bits}-bit"] = lambda *args, bits=bits: Quantised(*args, bits)


def call(*flags):
    """dppo.main() without its reports -> "" or how it ended early."""
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        with contextlib.redirect_stderr(null):
            try:
                dppo.main([*map(str, flags)])
            except SystemExit as stop:
                return f"stopped by dppo.py, code {stop.code}"
    return ""


def solvable(directory):
    """The toy model with those problems that it solves 20 % to 80 % of the time, by dppo.py's own
    sanity test: once, for all runs. -> how many problems these are."""
    base, run = directory / "toy-base", directory / "first"
    lm.make(base)
    call("--out", run, "--steps", "1", "--engine", "hf", "--eval-samples", "1")
    chosen = torch.load(run / "step-000001" / "trainer.pt", weights_only=True)["problems"]
    rows = [json.dumps(dict(prompt=p["text"], answer=p["gold"])) + "\n" for p in chosen]
    (base / "problems.jsonl").write_text("".join(rows))
    shutil.rmtree(run)
    return len(chosen)


def run(job):
    """One run -> its row. A function of the process pool."""
    (method, lr, engine, seed, steps, problems), base = job
    dppo.load_engine = ENGINES[engine]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        (out.parent / "toy-base").symlink_to(base)  # where dppo.py looks for its toy model
        flags = ["--method", *method.split(), "--lr", lr, "--seed", seed, "--steps", steps]
        flags += "--prompts-per-step 64 --solve-rate 0 1 --stop-at 2".split()
        flags += "--eval-every 100000 --eval-samples 2 --save-every 100000 --keep 1".split()
        ended = call(*flags, "--out", out)
        rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    accuracy = [row["accuracy"] for row in rows if "accuracy" in row]  # before and after
    rows = [row for row in rows if "reward" in row]
    settings = dict(zip(RUN, job[0])) | dict(ended=ended, accuracy=accuracy)
    return settings | {k: [float(f"{row.get(k, 0.0):.3g}") for row in rows] for k in SERIES}


def main():
    parser = argparse.ArgumentParser("python -m toy.study")
    text = f'comma-separated: NAME, "NAME --flag value", or one of {", ".join(LISTS)}'
    parser.add_argument("--methods", default=",".join(LISTS), help=text)
    parser.add_argument("--lrs", default="3e-4,6e-4,8.5e-4", help="learning rates")
    parser.add_argument("--engine", default="5-bit", choices=ENGINES)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("runs/study.jsonl"))
    args = parser.parse_args()
    methods = sum((LISTS.get(name, [name]) for name in args.methods.split(",")), [])
    lrs = [*map(float, args.lrs.split(","))]
    if unknown := {method.split()[0] for method in methods} - {*dppo.METHODS}:
        dppo.die(f"--methods {', '.join(unknown)}: choose from {', '.join(dppo.METHODS)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in open(args.out)] if args.out.exists() else []
    known = {tuple(row[key] for key in RUN) for row in rows}
    order = [(m, lr, seed) for seed in range(args.seeds) for lr in lrs for m in methods]
    titles = f"{'first 5':>9}{'best 5':>8}{'last 5':>8}{'|pi-mu|':>9}"
    mean = lambda part: sum(part) / max(1, len(part))
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as base:
        problems = solvable(Path(base))
        wanted = [(m, lr, args.engine, seed, args.steps, problems) for m, lr, seed in order]
        jobs = [job for job in wanted if job not in known]
        told = f"{len(jobs)} runs to do, {len(wanted) - len(jobs)} in {args.out}"
        print(f"a base model with {problems} problems: {told}", file=sys.stderr)
        print(f"{'method':<28}{'lr':>8}{'seed':>5}{titles}")
        with ProcessPoolExecutor(args.processes, spawn) as pool:
            started = [pool.submit(run, (job, f"{base}/toy-base")) for job in jobs]
            for row in (job.result() for job in as_completed(started)):
                with open(args.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
                R = row["reward"]
                best = max([mean(R[i : i + 5]) for i in range(len(R) - 4)] or R or [0.0])
                print(
                    f"{row['method']:<28}{row['lr']:>8.1e}{row['seed']:>5}{mean(R[:5]):>9.3f}"
                    f"{best:>8.3f}{mean(R[-5:]):>8.3f}{mean(row['gap_mean'][-5:]):>9.4f} "
                    f"{row['ended']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
