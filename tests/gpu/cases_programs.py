"""Whole programs: a training step and a generation, the same bit for bit as under torch's own allocator."""
import json
import os
import subprocess
import sys
import threading
import time

from harness import Parent, Skip, check, equal, test


#: Processors that both processes may use, the same for both: some of a virtual machine's are slower than others.
CPUS = 4


def _compare(kind, timeout):
    """Both processes come up together; then each does one step, in turn, so that what the machine does meets both."""
    env = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    command = [sys.executable, __file__, kind]
    pipe = subprocess.PIPE
    running = {
        mode: subprocess.Popen([*command, mode], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env) for mode in ("native", "ours")
    }

    def ask(mode, line):
        process = running[mode]
        if line:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        for answer in process.stdout:
            if answer.startswith("{"):
                return json.loads(answer)
        process.wait(20)
        raise AssertionError(f"{kind} {mode}: code {process.returncode}: {process.stderr.read()[-2500:]}")

    watch = threading.Timer(timeout, lambda: [process.kill() for process in running.values()])
    watch.daemon = True
    watch.start()
    try:
        steps = 0
        for mode in running:
            ready = ask(mode, None)
            if ready.get("skip"):
                raise Skip(ready["skip"])
            steps = ready["steps"]
        took = {mode: [] for mode in running}
        for turn in range(steps):
            for mode in sorted(running, reverse=bool(turn % 2)):
                took[mode].append(ask(mode, "step")["ms"])
        found = {mode: ask(mode, "end") for mode in running}
    finally:
        watch.cancel()
        for process in running.values():
            process.kill()
            process.wait()
    equal(found["ours"].pop("values"), found["native"].pop("values"), "losses or tokens, ours against native")
    ratios = sorted(ours / native for ours, native in zip(took["ours"], took["native"]))
    for mode, times in took.items():
        found[mode]["step_ms"] = round(sorted(times)[len(times) // 2], 3)
    ours, native = found["ours"], found["native"]
    peaks = {key + "_ratio": round(ours[key] / native[key], 3) for key in ours if key != "step_ms"}
    quartiles = [round(ratios[len(ratios) * n // 4], 3) for n in (1, 2, 3)]
    return {"ours": ours, "native": native, "step_ms_ratio_quartiles": quartiles, "steps": steps, **peaks}


@test(timeout=100, alone=True, quick=False)
def training_step():
    """A small transformer trained for some steps: same losses bit for bit, time and peak beside native's."""
    return _compare("train", 90)


@test(timeout=110, alone=True, quick=False)
def training_gpt2_of_transformers():
    """The same with GPT-2 (random weights) of transformers."""
    return _compare("gpt2", 100)


@test(timeout=110, alone=True, quick=False)
def generation():
    """Greedy generation with a growing cache, GPT-2 with random weights: same tokens."""
    return _compare("generate", 100)


def _start(mode):
    import torch

    if mode == "ours":
        parent = Parent()
        globals()["_keep"] = parent
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    return torch


def _measure(torch, step, warm, steps):
    """Warms up, then does a step whenever it is told to."""
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, available[-CPUS:])
    torch.set_num_threads(CPUS)
    values = [step() for _ in range(warm)]
    torch.cuda.synchronize()
    # Of processors one may be half as fast as the next: the thread that launches has the same one on both sides.
    os.sched_setaffinity(0, available[-1:])
    print(json.dumps({"steps": steps}), flush=True)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        start = time.perf_counter()
        values.append(step())
        torch.cuda.synchronize()
        print(json.dumps({"ms": (time.perf_counter() - start) * 1e3}), flush=True)
    return {
        "values": values,
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

    return _measure(torch, step, 5, 150)


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

    return _measure(torch, step, 3, 90)


def generate(mode):
    torch = _start(mode)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = _gpt2(torch).eval()
    x = torch.randint(0, 5000, (4, 16)).cuda()

    def step():
        with torch.no_grad():
            return model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=30, do_sample=False, pad_token_id=0).flatten().tolist()

    return _measure(torch, step, 3, 32)


if __name__ == "__main__" and len(sys.argv) == 3:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    print(json.dumps({"train": train, "gpt2": gpt2, "generate": generate}[sys.argv[1]](sys.argv[2])), flush=True)
    os._exit(0)
