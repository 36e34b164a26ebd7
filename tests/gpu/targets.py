"""What a whole run must show on a GPU: limits for the figures in results.json. A stage that judges figures itself says so beside them
("met"). A missed target is no failure: machines differ, and the same one changes its speed."""
import fnmatch

#: (stage, figure, limit). A figure: the names on the way to it from the stage's figures, of a list the numbers; `*` and `?` as in file names.
AT_MOST = (
    ("micro", "handoff/*iB_us/p50", 30),
    ("micro", "handoff/p50_largest_size_over_smallest", 1.2),
    ("micro", "first_use/chunk_512MiB_ms_per_GiB/p50", 0.3),
    ("micro", "first_use/chunk_?GiB_ms_per_GiB/p50", 0.3),
    ("micro", "growth/malloc_1GiB*_us/p50", 500),
    ("micro", "kill/bytes_usable_by_another_ms_after_kill/p50", 150),
    ("micro", "death/released_after_gone_us/p50", 1000),
    ("torch", "handoff_round_trip/ours_*_us/p50", 80),
    ("torch", "handoff_round_trip/p50_largest_over_smallest", 1.2),
    ("torch", "what_an_attach_costs/without_cuda_context_ms", 20),
    ("torch", "tier_2_beside_one_copy_on_the_gpu/worst_ratio_device", 1.1),
    # Of the quartiles the lowest: above 1 it is more than noise.
    *(
        ("torch", f"{program}/{figure}", 1.0)
        for program in ("training_step", "training_gpt2_of_transformers", "generation")
        for figure in ("step_ms_ratio_quartiles/0", "peak_allocated_MiB_ratio", "peak_reserved_MiB_ratio")
    ),
)
AT_LEAST = (
    ("torch", "four_gib_by_pinned_host_at_the_rate_of_the_bus/ratio/*", 0.9),
    ("torch", "both_copies_of_a_value_by_pinned_host_at_once/ratio_of_the_bus", 0.9),
)
#: Judged by their stage; here only so that they are missed where they are not there at all.
JUDGED = (("micro", "lease/life_ns"), ("bench", "targets/*"))


def leaves(value, path=()):
    """(path, value) of everything in it, the insides too."""
    yield path, value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inside:
        yield from leaves(below, (*path, str(key)))


def judge(results):
    """(missed, lacking): sentences for the targets that were missed, and the names of those of which a stage that ran has no figure."""
    missed, lacking = [], []
    whole = {stage: list(leaves(found.get("figures") or {})) for stage, found in results.items() if isinstance(found, dict)}
    for stage, found in whole.items():
        for path, value in found:
            if isinstance(value, dict) and value.get("met") is False:
                name = value.get("what") or "/".join(path)
                missed.append(f"{stage} {name}: {value.get('found', value.get('p50'))} (at most {value.get('at_most')})")
    # The limits are a GPU's.
    if results.get("driver_kind") != "cuda":
        return missed, lacking
    rows = [(*row, "at most") for row in AT_MOST] + [(*row, "at least") for row in AT_LEAST] + [(*row, None, None) for row in JUDGED]
    for stage, pattern, limit, side in rows:
        if stage not in whole:
            continue
        found = [(path, value) for path, value in whole[stage] if matches(path, pattern)]
        if side:
            found = [(path, value) for path, value in found if type(value) in (int, float)]
        if not found:
            lacking.append(f"{stage} {pattern}")
        for path, value in found if side else ():
            if value > limit if side == "at most" else value < limit:
                missed.append(f"{stage} {'/'.join(path)}: {value} ({side} {limit})")
    return missed, lacking


def matches(path, pattern):
    names = pattern.split("/")
    return len(path) == len(names) and all(map(fnmatch.fnmatchcase, path, names))
