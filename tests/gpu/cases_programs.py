"""Whole programs: a training step and a generation, the same bit for bit as under torch's own allocator."""
import json
import os
import subprocess
import sys

from harness import Parent, Skip, check, equal, test


def _compare(kind, timeout):
    found = {}
    for mode in ("native", "ours"):
        env = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
        done = subprocess.run([sys.executable, __file__, kind, mode], capture_output=True, text=True, timeout=timeout, env=env)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        check(done.returncode == 0 and lines, f"{kind} {mode}: code {done.returncode}: {done.stderr[-2500:]}")
        found[mode] = json.loads(lines[-1])
        if found[mode].get("skip"):
            raise Skip(found[mode]["skip"])
    equal(found["ours"].pop("values"), found["native"].pop("values"), "losses or tokens, ours against native")
    a, b = found["ours"], found["native"]
    ratio = {key + "_ratio": round(a[key] / b[key], 3) for key in a if isinstance(a[key], (int, float)) and b.get(key)}
    return {"ours": a, "native": b, **ratio}


@test(timeout=100, alone=True, quick=False)
def training_step():
    """A small transformer trained for some steps: same losses bit for bit, time and peak beside native's."""
    return _compare("train", 48)


@test(timeout=110, alone=True, quick=False)
def training_gpt2_of_transformers():
    """The same with GPT-2 (random weights) of transformers."""
    return _compare("gpt2", 54)


@test(timeout=110, alone=True, quick=False)
def generation():
    """Greedy generation with a growing cache, GPT-2 with random weights: same tokens."""
    return _compare("generate", 54)


def _start(mode):
    import torch

    if mode == "ours":
        parent = Parent()
        globals()["_keep"] = parent
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    return torch


def _measure(torch, step, warm, steps):
    import time

    values = []
    for _ in range(warm):
        values.append(step())
    torch.cuda.synchronize()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        values.append(step())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    times.sort()
    return {
        "values": values,
        "step_ms": round(times[len(times) // 2] * 1e3, 3),
        "peak_allocated_MiB": torch.cuda.max_memory_allocated() >> 20,
        "peak_reserved_MiB": torch.cuda.max_memory_reserved() >> 20,
    }


def train(mode):
    torch = _start(mode)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 512), torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.nn.Linear(512, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    generator = torch.Generator().manual_seed(1)

    def step():
        x = torch.randint(0, 1000, (8, 128 + int(torch.randint(0, 64, (1,), generator=generator))), generator=generator).cuda()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss).hex()

    return _measure(torch, step, 5, 40)


def _gpt2(torch):
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except Exception as e:
        print(json.dumps({"skip": f"transformers: {type(e).__name__}: {e}"}))
        sys.exit(0)
    config = GPT2Config(n_layer=6, n_head=12, n_embd=768, vocab_size=5000, n_positions=1024)
    return GPT2LMHeadModel(config).cuda()


def gpt2(mode):
    torch = _start(mode)
    model = _gpt2(torch)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    generator = torch.Generator().manual_seed(1)

    def step():
        x = torch.randint(0, 5000, (4, 256), generator=generator).cuda()
        loss = model(input_ids=x, labels=x).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss).hex()

    return _measure(torch, step, 3, 20)


def generate(mode):
    torch = _start(mode)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = _gpt2(torch).eval()
    x = torch.randint(0, 5000, (4, 16)).cuda()

    def step():
        with torch.no_grad():
            return model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=120, do_sample=False, pad_token_id=0).flatten().tolist()

    return _measure(torch, step, 1, 3)


if __name__ == "__main__" and len(sys.argv) == 3:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    print(json.dumps({"train": train, "gpt2": gpt2, "generate": generate}[sys.argv[1]](sys.argv[2])), flush=True)
    os._exit(0)
