"""Records the allocation traces that benches/traces/ ships: `python3 record_traces.py OUT.tar`. Needs a GPU and torch.

Each program runs under MILLPOND_TRACE with torch's allocator replaced; `millpond replay --record` makes CSV of what was
recorded, and gzip a file of each. All random weights, a few seconds each; the programs run at the same time."""
import glob
import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile

EVENTS = "200000"
#: Of prefetch and of the exchanging workers: some eighteen and six calls each, and p99.9 needs thousands.
TURNS = 1500
_arena = None


def training(torch):
    """A transformer trained on batches of changing length."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 512), torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.nn.Linear(512, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for turn in range(20):
        x = torch.randint(0, 1000, (8, 128 + (turn * 37) % 64)).cuda()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def generation(torch):
    """Tokens one by one: every layer's cache grows by concatenation."""
    heads, width, layers = 12, 64, 8
    weights = [torch.randn(heads * width, 3 * heads * width, device="cuda") * 0.02 for _ in range(layers)]
    for batch in (1, 4):
        caches = [(torch.empty(batch, heads, 0, width, device="cuda"),) * 2 for _ in range(layers)]
        x = torch.randn(batch, 1, heads * width, device="cuda")
        for _ in range(120):
            for n, weight in enumerate(weights):
                q, k, v = (x @ weight).view(batch, 1, 3, heads, width).permute(2, 0, 3, 1, 4)
                k, v = torch.cat([caches[n][0], k], 2), torch.cat([caches[n][1], v], 2)
                caches[n] = (k, v)
                x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, 1, -1)


def diffusion(torch):
    """A small U-Net over images whose size changes from one to the next."""
    conv = lambda a, b, stride=1: torch.nn.Conv2d(a, b, 3, stride, 1).cuda()
    down, middle, up, out = [conv(4, 64), conv(64, 128, 2), conv(128, 256, 2)], conv(256, 256), [conv(512, 128), conv(256, 64)], conv(128, 4)
    act = torch.nn.functional.silu
    with torch.no_grad():
        for size in (256, 384, 512, 320, 640, 256, 512):
            x = torch.randn(1, 4, size, size, device="cuda")
            for _ in range(8):
                kept, h = [], x
                for layer in down:
                    h = act(layer(h))
                    kept.append(h)
                h = act(middle(h))
                for layer in up:
                    h = act(layer(torch.cat([h, kept.pop()], 1)))
                    h = torch.nn.functional.interpolate(h, scale_factor=2)
                x = x - 0.1 * out(torch.cat([h, kept.pop()], 1))


def prefetch(torch):
    """The next batch is copied on a stream of its own while this one is worked on; record_stream tells."""
    side = torch.cuda.Stream()
    weight = torch.randn(1024, 1024, device="cuda")
    host = [torch.randn(2048 + 512 * (n % 3), 1024).pin_memory() for n in range(6)]

    def fetch(n):
        with torch.cuda.stream(side):
            return host[n % 6].to("cuda", non_blocking=True)

    batch = fetch(0)
    for turn in range(TURNS):
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        following = fetch(turn + 1)
        y = batch
        for _ in range(4):
            y = torch.relu(y @ weight)
        batch = following


def swapping(torch):
    """Models of different sizes come to the GPU, work, and go."""
    models = [torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)]) for width, depth in ((1024, 12), (2048, 6), (1536, 10), (512, 40))]
    with torch.no_grad():
        for turn in range(24):
            model = models[(turn * 5 + turn // 4) % 4]
            model.cuda()
            x = torch.randn(256, model[0].in_features, device="cuda")
            for _ in range(3):
                x = model(x).relu()
            model.cpu()
            if turn % 6 == 5:
                torch.cuda.empty_cache()


def exchanging(torch):
    """Several processes at once: two workers make tensors of many sizes, hand them to the parent, and it to the other."""
    conns = []
    for n in range(2):
        env = _arena.worker_env(f"exchanging-{n}")
        subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker"], env=env)
        conns.append(_arena.accept(timeout=60))
    for turn in range(TURNS):
        for n, conn in enumerate(conns):
            conn.send({"size": 4096 << (turn * 7 + n) % 12, "others": None})
            made = conn.recv(timeout=30)["made"]
            conns[1 - n].send({"size": 1024, "others": made})
            conns[1 - n].recv(timeout=30)
    for conn in conns:
        conn.send(None)


def worker():
    import millpond

    millpond.attach()
    import torch

    millpond.torch.install()
    conn, kept = millpond.connection(timeout=60), []
    while True:
        job = conn.recv(timeout=60)
        if job is None:
            return
        kept = [*kept[-3:], job["others"] * 2 if job["others"] is not None else None]
        conn.send({"made": torch.rand(job["size"] // 4 * 3, device="cuda")})


PROGRAMS = {f.__name__: f for f in (training, generation, diffusion, prefetch, swapping, exchanging)}


def run(name):
    import millpond

    global _arena
    _arena = millpond.Arena(driver="cuda", limit="30%", name=name)
    import torch

    millpond.torch.install()
    torch.manual_seed(0)
    PROGRAMS[name](torch)
    torch.cuda.synchronize()
    _arena.close()


def main(out):
    program = os.environ.get("MILLPOND_PROGRAM", "millpond")
    with tempfile.TemporaryDirectory() as work:
        running = {}
        for name in PROGRAMS:
            folder = os.path.join(work, name)
            os.mkdir(folder)
            env = dict(os.environ, MILLPOND_TRACE=folder, MILLPOND_TRACE_EVENTS=EVENTS)
            running[name] = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--run", name], env=env)
        with tarfile.open(out, "w") as tar:
            for name, process in running.items():
                if process.wait(90):
                    print(f"{name}: code {process.returncode}", file=sys.stderr)
                    continue
                csv = os.path.join(work, name + "-csv")
                done = subprocess.run([program, "replay", "--record", csv, os.path.join(work, name)], capture_output=True, text=True)
                print(name, done.stdout.strip().splitlines()[-1:] or done.stderr[-500:])
                for n, path in enumerate(sorted(glob.glob(os.path.join(csv, "*.csv")))):
                    packed = os.path.join(work, f"{name}-{n}.csv.gz")
                    with open(path, "rb") as plain, open(packed, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as zipped:
                        shutil.copyfileobj(plain, zipped)
                    tar.add(packed, os.path.basename(packed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2])
    elif sys.argv[1:2] == ["--worker"]:
        worker()
    else:
        main(sys.argv[1])
