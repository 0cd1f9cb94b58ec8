"""Measurements, run by hand. Each exits with 1 when one of its targets is missed.

python tests/bench.py step              a training step: CPU seconds and peak memory, as ratios
python tests/bench.py scaling           the same against the response's length and against K
python tests/bench.py rollout           how long vLLM's log-probs take to become tensors
python tests/bench.py soak [FLAGS]      a run of 500 steps: memory, threads, open files
python tests/bench.py memory --model ID_OR_DIR --prompt 2048 --response 8192 [--gpu-memory 80]
                                        the memory plan of one GPU, from the config alone
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import MethodType

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads do not burn CPU seconds
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import dppo  # noqa: E402

# ------------------------------------------------------------------------------- a training step

PROMPT, B = 32, 8  # 8 sequences of 32 + T tokens
SIZES = dict(
    vocab_size=151_936,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=768,
    max_position_embeddings=16_384,
)


class Step:
    """One optimizer step on a random Qwen3 with the full vocabulary, in several ways."""

    def __init__(self, T, K, n=B):
        from toy import lm

        self.model = lm.random_model(**SIZES)
        self.model.at_head = MethodType(dppo.at_head, self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0)
        self.args = dppo.Args(max_response=T, micro_batch_tokens=10**9)
        draw = torch.Generator().manual_seed(0)
        ids = lambda *shape: torch.randint(SIZES["vocab_size"], shape, generator=draw)
        self.samples = []
        for i in range(n):
            logmu = torch.full((T, 1 + K), -11.0) + torch.rand(T, 1 + K, generator=draw)
            sample = dppo.Sample(ids(PROMPT).tolist(), ids(T, 1 + K), logmu, True)
            sample.A = (-1.0) ** i
            self.samples.append(sample)
        self.N = n * T

    def ours(self, method):
        """The script's own update."""
        dppo.update(self.model, self.optimizer, self.samples, method, self.args)

    def autograd(self, method):
        """The same with plain autograd on the full logits, as trainers commonly do it."""
        hidden, weight = dppo.head_inputs(self.model, self.samples)
        y_ids, logmu = (dppo.flat(self.samples, name) for name in ("y_ids", "logmu"))
        A = torch.cat([torch.full((len(s.y_ids),), s.A) for s in self.samples])
        logpi = dppo.log_probs(hidden, weight, 1.0).gather(-1, y_ids)
        keep = dppo.keep_mask(A, logmu.exp(), logpi.detach().exp(), method)
        dppo.policy_loss(logpi[:, 0], logmu[:, 0], A, keep, method.cap).sum().backward()
        self.finish()

    def floor(self, method):
        """The matrix products of a step, which no way of writing the loss avoids."""
        hidden, weight = dppo.head_inputs(self.model, self.samples)
        h, W, d_hidden, d_weight = hidden.detach(), weight.detach(), [], 0.0
        for rows in dppo.chunks(len(h), 1024):  # larger is not faster
            logits = h[rows] @ W.T
            d_hidden.append(logits @ W)
            d_weight = d_weight + logits.T @ h[rows]
        (hidden * torch.cat(d_hidden)).sum().backward()
        weight.grad = d_weight if weight.grad is None else weight.grad + d_weight
        self.finish()

    def finish(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def method(K):
    return replace(dppo.METHODS["dppo-topk-tv"], top_k=K)


def seconds(f, *args):
    """CPU seconds of all threads, and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    f(*args)
    return time.process_time() - cpu, time.perf_counter() - wall


def peak(way, T, K, n=B):
    """Peak memory in GB of a process of its own that makes one step; "none": that makes no step."""
    code = f"import bench; s = bench.Step({T}, {K}, {n}); "
    code += "" if way == "none" else f"s.{way}(bench.method({K})); "
    # not getrusage: its maximum includes what this process held when it started the other
    code += "print(next(x for x in open('/proc/self/status') if 'VmHWM' in x).split()[1])"
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, cwd=ROOT / "tests", capture_output=True, text=True, check=True)
    return int(out.stdout) * 1024 / 1e9


def step(argv):
    parser = argparse.ArgumentParser("bench.py step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[224, 480])
    args, missed = parser.parse_args(argv), []
    for T in args.tokens:
        steps = {K: Step(T, K) for K in (0, 20)}
        ways = {
            "the matrix products alone": (steps[0].floor, 0),
            "this script, binary": (steps[0].ours, 0),
            "this script, top-20": (steps[20].ours, 20),
            "autograd on full logits": (steps[0].autograd, 0),
        }
        times = {name: [] for name in ways}
        for turn in range(args.rounds + 1):  # interleaved; the first round warms up
            for name, (way, K) in ways.items():
                cpu = seconds(way, method(K))[0]
                times[name] += [cpu] * (turn > 0)
        cpu = {name: median(values) for name, values in times.items()}
        memory = {name: peak(way.__name__, T, K) for name, (way, K) in ways.items()}
        first, binary, top, plain = ways
        print(
            f"\n{B} sequences of {PROMPT} + {T} tokens{'CPU s':>16}{'/ products':>12}{'peak GB':>9}"
        )
        for name in ways:
            print(
                f"{name:<36}{cpu[name]:>10.2f}{cpu[name] / cpu[first]:>12.2f}{memory[name]:>9.2f}"
            )
        checks = [
            ("binary / products", cpu[binary] / cpu[first], 1.5),
            ("top-20 / products", cpu[top] / cpu[first], 1.5),
            ("top-20 / binary", cpu[top] / cpu[binary], 1.05),
            ("memory: script / autograd", memory[top] / memory[plain], 1 / 3),
            ("slowest mask of all rows / step", slowest_mask(steps[20]) / cpu[binary], 0.01),
        ]
        for name, value, target in checks:
            missed += [name] * (value > target)
            verdict = "ok" if value <= target else "MISSED"
            print(f"{name:<36}{value:>10.4f}   target {target:.3f}   {verdict}")
    return bool(missed)


def slowest_mask(step):
    """CPU seconds of distance and mask for a step's tokens, of the row that takes longest."""
    logmu = dppo.flat(step.samples, "logmu")
    anchor, pi = logmu.exp(), (logmu + 0.1).exp()
    A = torch.ones(len(logmu))
    costs = []
    for row in dppo.METHODS.values():
        a, b = anchor[:, : 1 + row.top_k], pi[:, : 1 + row.top_k]
        costs.append(median(seconds(dppo.keep_mask, A, a, b, row)[0] for _ in range(5)))
    return max(costs)


def scaling(argv):
    """Wall seconds and memory of one sequence's step."""
    print(f"{'T':>6}{'K':>5}{'s a step':>10}{'peak GB':>9}{'of which the step':>19}")
    for T, K in [(512, 0), (1024, 0), (2048, 0), (4096, 0), (8192, 0), (2048, 20), (2048, 200)]:
        s = Step(T, K, 1)
        s.ours(method(K))
        wall = min(seconds(s.ours, method(K))[1] for _ in range(2))
        base, top = (peak(way, T, K, 1) for way in ("none", "ours"))
        print(f"{T:>6}{K:>5}{wall:>10.2f}{top:>9.2f}{top - base:>19.2f}")


# --------------------------------------------------------------------------------------- rollout


def rollout(argv):
    """256 x 512 tokens with K = 20: vLLM's time, and that of turning its log-probs into tensors."""
    from toy import lm

    directory = tempfile.mkdtemp()
    tokenizer = lm.tokenizer()
    model = lm.random_model(64)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    flags = (
        f"--model {directory} --max-prompt 16 --max-response 512 --engine vllm --max-response 490"
    )
    args = dppo.parse_args(flags.split())
    start = time.perf_counter()
    engine = dppo.VllmEngine(args, [], 20)  # without an end: every response has all its tokens
    print(f"start {time.perf_counter() - start:.1f} s")
    push = seconds(engine.push, model)[1]
    inner, spent = engine.llm.generate, []

    def timed(*args, **kwargs):
        start = time.process_time()
        result = inner(*args, **kwargs)
        spent.append(time.process_time() - start)
        return result

    engine.llm.generate = timed
    total = seconds(engine.generate, [[2, 3, 4]] * 8, 32, 0)[0]
    share = (total - spent[0]) / spent[0]
    print(f"push {push:.2f} s; torch has {torch.get_num_threads()} threads")
    print(f"256 x 490 tokens, K = 20: {spent[0]:.1f} CPU s in vLLM, {share:.1%} of it for tensors")
    print("ok" if share < 0.1 else "MISSED: the target is 10 %")
    return share >= 0.1


# ------------------------------------------------------------------------------------------ soak


def soak(flags):
    """Start dppo.py, look at its process in /proc until it ends, compare step 50 with the end."""
    out = Path(tempfile.mkdtemp()) / "run"
    argv = [sys.executable, str(ROOT / "dppo.py"), "--steps", "500", "--stop-at", "1", *flags]
    child, seen = subprocess.Popen([*argv, "--out", str(out)], stderr=subprocess.DEVNULL), []
    proc, log = Path(f"/proc/{child.pid}"), out / "metrics.jsonl"
    while child.poll() is None:
        time.sleep(1)
        try:
            status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
            files, step = len([*(proc / "fd").iterdir()]), log.read_text().count("reward")
            rss, threads = int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"])
            seen.append((step, rss, threads, files))
        except (OSError, KeyError):  # not begun, or gone
            continue
    rows = [json.loads(line) for line in open(log)]
    gaps = [row["gap_log_max"] for row in rows if "gap_log_max" in row]
    early = [x for x in seen if x[0] >= 50][:10]
    late = [x for x in seen if x[0] < len(gaps)][-10:]
    mean = lambda rows, i: sum(row[i] for row in rows) / len(rows)
    print(f"{len(gaps)} steps            at step 50      at the end")
    for i, name in enumerate(("RSS, MB", "threads", "open files"), 1):
        print(f"{name:<22}{mean(early, i):>12.1f}{mean(late, i):>16.1f}")
    print(f"{'largest mismatch':<22}{max(gaps[:50]):>12.1e}{max(gaps[-50:]):>16.1e}")
    grown = mean(late, 1) / mean(early, 1) - 1
    print(f"RSS {grown:+.1%} (target: within 5 %)")
    return child.returncode or abs(grown) > 0.05 or mean(late, 2) > mean(early, 2)


# ---------------------------------------------------------------------------------------- memory


def memory(argv):
    """Where the bytes of one GPU go, from the model's config alone. Nothing is loaded."""
    parser = argparse.ArgumentParser("bench.py memory")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", type=int, default=dppo.Args.max_prompt)
    parser.add_argument("--response", type=int, default=dppo.Args.max_response)
    parser.add_argument("--gpu-memory", type=float, default=80, help="GB of the card")
    parser.add_argument("--share", type=float, default=dppo.Args.gpu_memory, help="vLLM's")
    parser.add_argument("--head-chunk", type=int, default=1024)
    args = parser.parse_args(argv)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(args.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    c = config.get_text_config()
    N, V, H = sum(p.numel() for p in model.parameters()), c.vocab_size, c.hidden_size
    heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * (
        getattr(c, "head_dim", None) or H // c.num_attention_heads
    )
    T = args.prompt + args.response  # one sequence, the least that a forward takes
    tokens = max(T, dppo.Args.micro_batch_tokens // T * T)
    rows = min(args.head_chunk, args.response)
    resident = {"master weights, float32": 4 * N, "Adam, 2 x float32": 8 * N}
    sampling = resident | {
        f"vLLM, {args.share:.0%} of the card": args.share * args.gpu_memory * 1e9
    }
    training = resident | {
        "gradients, float32": 4 * N,
        "weights as bfloat16 (autocast's copies)": 2 * N,
        "layers' inputs, float32, for checkpointing": 4 * tokens * H * c.num_hidden_layers,
        # forward and backward of one layer: 2 x (q k v and rotated, MLP's three, norms in float32)
        "one layer's activations": 2 * tokens * (4 * heads + 6 * c.intermediate_size + 16 * H),
        "last hidden states and their gradient": 2 * 4 * tokens * H,
        "head's gradient, float32 and bfloat16": 6 * V * H,
        "head's chunk: logits, softmax, gradient": (2 + 4 + 4 + 2) * rows * V,
        "CUDA, kernels, vLLM asleep (a guess)": 2e9,
    }
    print(f"{args.model}: {N / 1e9:.2f} B parameters, {tokens:,} tokens a forward, sizes in GB")
    print("a plan by arithmetic, not compared with a GPU")
    fits = True
    for stage, parts in (("while vLLM samples", sampling), ("while the trainer works", training)):
        total = sum(parts.values()) / 1e9
        fits &= total <= args.gpu_memory
        print(f"\n{stage}")
        for name, size in parts.items():
            print(f"  {name:<44}{size / 1e9:>8.2f}")
        print(f"  {'total':<44}{total:>8.2f}   of {args.gpu_memory:g}")
    weights, cache = 2 * N / 1e9, args.share * args.gpu_memory
    print(
        f"\nvLLM's share: {weights:.1f} GB of bfloat16 weights, {cache - weights:.1f} GB of cache"
    )
    fits &= cache > 1.2 * weights
    print(
        "fits" if fits else "DOES NOT FIT: fewer tokens, another --share, or more GPUs (torchrun)"
    )
    return not fits


if __name__ == "__main__":
    tasks = dict(step=step, scaling=scaling, rollout=rollout, soak=soak, memory=memory)
    if len(sys.argv) < 2 or sys.argv[1] not in tasks:
        sys.exit(__doc__)
    sys.exit(tasks[sys.argv[1]](sys.argv[2:]))
