"""The paper's comparison in small: dppo.py itself, on the toy model, for many methods and seeds.

    python -m toy.study --methods dppo-binary-tv,pg-is --seeds 1 --steps 20      minutes
    python -m toy.study                                                          all of it: hours

Each run is dppo.main(), with one thing changed: the engine samples from weights that differ from
the trainer's, by what --engine says. A run that is in --out already is not repeated, so the study
can be stopped at any time. A run is one line of JSON: its settings, and a list over the steps for
each of SERIES. What dppo.py itself stops (a NaN, an engine too far off) ends its lists there.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process a core

import torch

import dppo
from toy import lm

STABILITY = (
    "pg-is cispo minirl minirl-tis grpo dppo-binary-kl dppo-binary-tv "
    "dppo-binary-kl-recompute dppo-binary-tv-recompute"
).split()
SERIES = "reward gap_mean gap_last_mean blocked bad_updates entropy ratio_max grad_norm".split()
FLAGS = "--prompts-per-step 64 --solve-rate-samples 8 --save-every 100000 --keep 1".split()
OUT = Path(__file__).parent / "figures" / "study.jsonl"


class EightBits(dppo.HfEngine):
    """Samples from the trainer's weights rounded to 8 bits, row by row, as quantised engines do.

    The embedding, which is the head as well, and the norms stay as they are.
    """

    exact = False

    def __init__(self, args, eos, K):
        super().__init__(args, eos, K)
        self.exact = False

    def push(self, model):
        from transformers import AutoModelForCausalLM

        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_config(model.config)
        self.model.load_state_dict(model.state_dict())
        with torch.no_grad():
            for name, w in self.model.named_parameters():
                if w.ndim == 2 and "embed" not in name:
                    scale = w.abs().amax(1, keepdim=True) / 127
                    w.copy_((w / scale).round() * scale)


ENGINES = {  # how the engine differs from the float32 trainer
    "same": lambda args, eos, K: dppo.HfEngine(args, eos, K),
    "8-bit": EightBits,
    "vllm-bf16": lambda args, eos, K: dppo.VllmEngine(
        dppo.replace(args, engine_dtype="bfloat16"), eos, K
    ),
}


def run(job):
    """One run -> its row. A function of the process pool."""
    method, lr, engine, seed, steps, base = job
    dppo.load_engine = ENGINES[engine]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        (Path(directory) / "toy-base").symlink_to(base)
        flags = [*FLAGS, "--method", method, "--lr", str(lr), "--seed", str(seed)]
        flags += ["--steps", str(steps), "--eval-every", "100000", "--out", str(out)]
        ended = ""
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            with contextlib.redirect_stderr(null):
                try:
                    dppo.main(flags)
                except SystemExit as stop:
                    ended = f"stopped by dppo.py, code {stop.code}"
        rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    rows = [row for row in rows if "reward" in row]
    series = {name: [round(row.get(name, 0.0), 5) for row in rows] for name in SERIES}
    settings = dict(method=method, lr=lr, engine=engine, seed=seed, steps=steps)
    return settings | dict(ended=ended) | series


def key(row):
    return tuple(row[name] for name in ("method", "lr", "engine", "seed", "steps"))


def main():
    parser = argparse.ArgumentParser("python -m toy.study")
    parser.add_argument("--methods", default=",".join(STABILITY), help="rows of METHODS")
    parser.add_argument("--lrs", default="3e-4,6e-4,1.2e-3,2.4e-3", help="learning rates")
    parser.add_argument("--engine", default="8-bit", choices=ENGINES)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to this")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    methods = args.methods.split(",")
    if unknown := {*methods} - {*dppo.METHODS}:
        dppo.die(f"--methods {', '.join(unknown)}: choose from {', '.join(dppo.METHODS)}")
    base, _ = lm.make(Path("runs") / "toy-base")
    done = [json.loads(line) for line in open(args.out)] if args.out.exists() else []
    known = {key(row) for row in done}
    jobs = [
        (method, float(lr), args.engine, seed, args.steps, str(base.resolve()))
        for seed in range(args.seeds)
        for lr in args.lrs.split(",")
        for method in methods
    ]
    jobs = [job for job in jobs if job[:5] not in known]
    print(f"{len(jobs)} runs to do, {len(known)} in {args.out}", file=sys.stderr)
    print(
        f"{'method':<26}{'lr':>9}{'seed':>5}{'first 5':>9}{'best 5':>8}{'last 5':>8}{'|pi-mu|':>9}"
    )
    spawn = dict(mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=8)
    with ProcessPoolExecutor(args.processes, **spawn) as pool:
        for row in map(lambda done: done.result(), as_completed(pool.submit(run, j) for j in jobs)):
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")
            R, gap = row["reward"], row["gap_mean"][-5:]
            mean = lambda part: sum(part) / max(1, len(part))
            best = max((mean(R[i : i + 5]) for i in range(max(1, len(R) - 4))), default=0.0)
            print(
                f"{row['method']:<26}{row['lr']:>9.1e}{row['seed']:>5}{mean(R[:5]):>9.3f}"
                f"{best:>8.3f}{mean(R[-5:]):>8.3f}{mean(gap):>9.4f} {row['ended']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
