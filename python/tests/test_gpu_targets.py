"""What tests/gpu/run.py says of targets, over an excerpt of a real run's results."""

import copy
import json
import sys
import types
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GPU = HERE.parent.parent / "tests" / "gpu"
if not GPU.exists():
    pytest.skip("no tests/gpu beside this package", allow_module_level=True)
sys.path.insert(0, str(GPU))
try:
    import run as gpu_run
    import targets
finally:
    sys.path.remove(str(GPU))

REAL = json.loads((HERE / "gpu_results.json").read_text())
BY_BENCH = "bench replay diffusion: p99.9 of the calls' medians without growth, ours, ns: 1559.1 (at most 1000)"


def changed(**figures):
    """The run's results with other figures: stage__name__name=value."""
    results = copy.deepcopy(REAL)
    results["bench"]["figures"]["targets"] = [row for row in REAL["bench"]["figures"]["targets"] if row["met"]]
    for name, value in figures.items():
        stage, *names, last = name.split("__")
        at = results[stage]["figures"]
        for part in names:
            at = at[part]
        at[int(last) if isinstance(at, list) else last] = value
    return results


def test_the_real_run_missed_what_its_stage_says_and_nothing_else():
    assert targets.judge(REAL) == ([BY_BENCH], [])
    assert targets.judge(changed()) == ([], [])


@pytest.mark.parametrize(
    "name, good, bad, says",
    [
        ("micro__handoff__64GiB_us__p50", 30, 30.1, "micro handoff/64GiB_us/p50: 30.1 (at most 30)"),
        ("micro__handoff__p50_largest_size_over_smallest", 1.2, 1.21, "micro handoff/p50_largest_size_over_smallest: 1.21 (at most 1.2)"),
        ("micro__first_use__chunk_512MiB_ms_per_GiB__p50", 0.3, 0.31, "micro first_use/chunk_512MiB_ms_per_GiB/p50: 0.31 (at most 0.3)"),
        ("micro__first_use__chunk_2GiB_ms_per_GiB__p50", 0.3, 0.31, "micro first_use/chunk_2GiB_ms_per_GiB/p50: 0.31 (at most 0.3)"),
        ("micro__growth__malloc_1GiB_us__p50", 500, 501, "micro growth/malloc_1GiB_us/p50: 501 (at most 500)"),
        ("micro__growth__malloc_1GiB_after_trim_us__p50", 500, 501, "micro growth/malloc_1GiB_after_trim_us/p50: 501 (at most 500)"),
        (
            "micro__kill__bytes_usable_by_another_ms_after_kill__p50",
            150,
            151,
            "micro kill/bytes_usable_by_another_ms_after_kill/p50: 151 (at most 150)",
        ),
        ("micro__death__released_after_gone_us__p50", 1000, 1001, "micro death/released_after_gone_us/p50: 1001 (at most 1000)"),
        ("torch__handoff_round_trip__ours_65536MiB_us__p50", 80, 81, "torch handoff_round_trip/ours_65536MiB_us/p50: 81 (at most 80)"),
        ("torch__training_step__step_ms_ratio_quartiles__0", 1.0, 1.01, "torch training_step/step_ms_ratio_quartiles/0: 1.01 (at most 1.0)"),
        ("torch__generation__peak_reserved_MiB_ratio", 1.0, 1.01, "torch generation/peak_reserved_MiB_ratio: 1.01 (at most 1.0)"),
        (
            "torch__four_gib_by_pinned_host_at_the_rate_of_the_bus__ratio__in",
            0.9,
            0.89,
            "torch four_gib_by_pinned_host_at_the_rate_of_the_bus/ratio/in: 0.89 (at least 0.9)",
        ),
    ],
)
def test_a_limit_may_be_reached_and_not_passed(name, good, bad, says):
    assert targets.judge(changed(**{name: good})) == ([], [])
    assert targets.judge(changed(**{name: bad})) == ([says], [])


def test_what_is_no_target_is_not_judged():
    noise = {"micro__handoff__64GiB_us__p99": 9e9, "micro__handoff__empty_message_us__p50": 9e9, "torch__training_step__step_ms_ratio_quartiles__1": 1.3}
    assert targets.judge(changed(**noise)) == ([], [])
    slow = {**changed(micro__handoff__64GiB_us__p50=900), "driver_kind": "host"}
    assert targets.judge(slow) == ([], []), "the limits are a GPU's"


def test_a_lease_s_own_word_counts():
    missed = changed(micro__lease__life_ns={"at_most": 2000, "met": False, "p50": 2333})
    assert targets.judge(missed) == (["micro lease/life_ns: 2333 (at most 2000)"], [])


def test_a_figure_that_is_not_there_is_said_and_not_missed():
    results = changed()
    del results["micro"]["figures"]["lease"], results["torch"]["figures"]["generation"], results["bench"]
    results["micro"]["figures"]["death"]["released_after_gone_us"] = {"p50": None}
    program = [f"torch generation/{name}" for name in ("step_ms_ratio_quartiles/0", "peak_allocated_MiB_ratio", "peak_reserved_MiB_ratio")]
    assert targets.judge(results) == ([], ["micro death/released_after_gone_us/p50", *program, "micro lease/life_ns"])


def summary(tmp_path, results, strict=False):
    runner = types.SimpleNamespace(
        results=results, start=0, options=types.SimpleNamespace(out=str(tmp_path), strict=strict), log=open(tmp_path / "log.txt", "w"), said=[]
    )
    runner.say = runner.said.append
    with runner.log:
        code = gpu_run.Runner.summary(runner)
    return code, "\n".join(runner.said).splitlines()


def test_the_last_lines_name_each_target_that_was_missed(tmp_path):
    end = f"; results: {tmp_path}/results.json"
    code, lines = summary(tmp_path, changed())
    assert (code, lines[-1]) == (0, "==== all well" + end) and not any("MISSED" in line for line in lines)

    slow = changed(micro__handoff__64GiB_us__p50=31.5, micro__lease__life_ns={"at_most": 2000, "met": False, "p50": 2333})
    sentences = ["micro lease/life_ns: 2333 (at most 2000)", "micro handoff/64GiB_us/p50: 31.5 (at most 30)"]
    code, lines = summary(tmp_path, slow)
    assert lines[-3:-1] == [f"MISSED  {sentence}" for sentence in sentences]
    assert (code, lines[-1]) == (0, "==== ran; 2 targets missed: " + "; ".join(sentences) + end)
    assert summary(tmp_path, slow, strict=True)[0] == 1

    slow["micro"]["exit_code"] = 1
    code, lines = summary(tmp_path, slow)
    assert code == 1 and lines[-1].startswith("==== 1 FAILED; 2 targets missed: ")


def test_a_quarter_is_all_that_noise_may_take(tmp_path):
    code, lines = summary(tmp_path, changed(torch__training_step__step_ms_ratio_quartiles=[0.999, 1.2, 1.3]))
    assert (code, lines[-1].split(";")[0]) == (0, "==== all well")
