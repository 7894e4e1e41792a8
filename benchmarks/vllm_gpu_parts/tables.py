"""Tables of what was found, in Markdown; whatever is missing is a dash."""

from collections.abc import Mapping, Sequence
from typing import Any

from print_parts.tables import cell, section

Found = Mapping[str, Any]


def describe(results: Sequence[Found], link: Found, setup: str) -> str:
    """Return everything found so far."""
    sections = [setup]
    shapes = list(dict.fromkeys(result["shape"] for result in results))
    for shape in shapes:
        of_shape = [result for result in results if result["shape"] == shape]
        sections.append(f"# {of_shape[0]['shape_text']}")
        sections.append(_starts(of_shape))
        if of_shape[0]["kind"] == "times":
            sections += [_passes(of_shape, link), _beside(of_shape)]
        else:
            sections.append(_answers(of_shape))
    return "\n\n".join(sections) + "\n"


def _starts(results: Sequence[Found]) -> str:
    rows = []
    for each in results:
        rest = each["ready_s"] - each["compile_s"] if {"ready_s", "compile_s"} <= each.keys() else None
        slots = f"{each.get('slots_at_ready', 0):.0f} then {each['slots']:.0f}" if "slots" in each else None
        rows.append(
            [
                each["engine"],
                each["verdict"] if each["verdict"] == "ok" else f"{each['verdict']} ({each.get('phase', 'begun')})",
                *(each.get(key) for key in ("import_s", "ready_s", "compile_s")),
                rest,
                each.get("pool_ready_s"),
                slots,
                *(each.get(key) for key in ("gpu_gb_at_ready", "gpu_gb_at_end")),
                each.get("shutdown_s"),
                each.get("exit_s"),
                each.get("kv_layout"),
            ]
        )
    header = (
        *("engine", "ended", "import s", "ready s", "of it compiling s", "rest s", "pool ready s later", "slots ready"),
        *("GPU GB used, ready", "at the end", "shutdown s", "exit s", "layout"),
    )
    note = (
        "The first engine imports alone, the others beside the start of the one before them. Ready: from the call "
        "until it can answer. Shutdown: what has not ended after 4.8 s is aborted to learn where it is; vLLM kills it "
        "after 5 s. Exit: from the end of the shutdown until the process is gone. GPU memory: of all "
        "processes."
    )
    return section("Start and end", header, rows, note)


def _passes(results: Sequence[Found], link: Found) -> str:
    speed = link.get("h2d")
    reference = next((each for each in results if each["offloading"] == "none"), {}).get("passes", [])
    rows = []
    for each in results:
        passes = each.get("passes", [])
        first = reference[0]["answers"] if reference else None
        for number, one in enumerate(passes, 1):
            link_s = one["loaded_nbytes"] / speed / 1e9 if speed and one["loaded_nbytes"] else None
            rows.append(
                [
                    each["engine"],
                    number,
                    one["seconds"],
                    f"{one['cached_tokens']} of {one['asked_tokens']}",
                    one["loaded_nbytes"] / 1e9,
                    link_s,
                    100 * link_s / one["seconds"] if link_s else None,
                    one["load_s"] or None,
                    one["stored_nbytes"] / 1e9,
                    one["declined_stores"],
                    _equal(one["answers"], first),
                ]
            )
    header = (
        *("engine", "pass", "s", "tokens not computed", "GB loaded", "s at link speed", "link %", "load s (metric)"),
        *("GB stored", "declined", "answers / first tokens equal"),
    )
    note = (
        f"Link: {cell(link.get('h2d'))} GB/s host to device, {cell(link.get('d2h'))} device to host "
        f"({link.get('gpu')}). The metric counts what the engine was told: kvmoor's is the time that a lane was seen "
        "to work, the wait for its event included; vLLM's own is by events on the stream. Equal: to the first pass "
        "without offloading."
    )
    return section("Passes", header, rows, note)


def _beside(results: Sequence[Found]) -> str:
    baseline = {
        phase["phase"]: phase for each in results if each["offloading"] == "none" for phase in each.get("beside", [])
    }
    rows = []
    for each in results:
        for phase in each.get("beside", []):
            alone = baseline.get("alone", {}).get("steps_per_s")
            same = baseline.get(phase["phase"], {}).get("steps_per_s")
            rows.append(
                [
                    each["engine"],
                    phase["phase"],
                    *(phase.get(key) for key in ("steps_per_s", "step_p50_ms", "step_p99_ms", "step_max_ms")),
                    phase["steps_per_s"] / alone if alone else None,
                    phase["steps_per_s"] / same if same else None,
                    phase["visits"] / phase["seconds"],
                    phase["loaded_nbytes"] / phase["seconds"] / 1e9,
                    phase["stored_nbytes"] / phase["seconds"] / 1e9,
                ]
            )
    header = (
        *("engine", "steady requests", "steps/s", "p50 ms", "p99 ms", "max ms", "x none alone", "x none, same phase"),
        *("visits/s", "GB/s loaded", "GB/s stored"),
    )
    return section("Steps of steady requests", header, rows)


def _answers(results: Sequence[Found]) -> str:
    reference = next((each for each in results if each["offloading"] == "none" and not each["eager"]), {})
    cases = reference.get("cases", {})
    rows = []
    for each in results:
        for case, one in each.get("cases", {}).items():
            expected = cases.get(_reference_case(case), {}).get("answers")
            rows.append(
                [
                    each["engine"],
                    case,
                    one["seconds"],
                    _equal(one["answers"], expected),
                    f"{one['cached_tokens']} of {one['asked_tokens']}",
                    one["loaded_nbytes"] / 1e9,
                    one["preemptions"],
                    one["failed_loads"],
                ]
            )
    header = (
        *("engine", "case", "s", "answers / first tokens equal", "tokens not computed", "GB loaded", "preemptions"),
        "failed loads",
    )
    note = (
        "Equal: to the same case without offloading, with CUDA graphs. Rounding turns near-ties, in bfloat16, wherever "
        "tokens are computed in other batches: what that alone does, the engine without offloading, eager, shows."
    )
    return section("Answers", header, rows, note)


def faults_of(results: Sequence[Found], *, exact: bool) -> list[str]:
    """Return what is wrong with the answers; `exact`: rounding excuses nothing."""
    wanted = 1.0 if exact else 0.75
    faults = [f"{each['name']}: {each['verdict']}" for each in results if each["verdict"] != "ok"]
    for shape in dict.fromkeys(each["shape"] for each in results if each["kind"] == "answers"):
        of_shape = [each for each in results if each["shape"] == shape]
        reference = next((each for each in of_shape if each["offloading"] == "none" and not each["eager"]), {})
        for each in of_shape:
            for case, one in each.get("cases", {}).items():
                expected = reference.get("cases", {}).get(_reference_case(case), {}).get("answers")
                if expected is None:
                    continue
                whole, first = _shares(one["answers"], expected)
                if "control" in case and whole > 0.5:
                    faults.append(f"{each['name']}, {case}: {whole:.0%} of the answers are equal all the same")
                elif "control" not in case and (whole if exact else first) < wanted:
                    faults.append(f"{each['name']}, {case}: only {first:.0%} of the first tokens are equal")
                if each["offloading"] == "kvmoor" and case == "second pass" and not one["loaded_nbytes"]:
                    faults.append(f"{each['name']}, {case}: nothing was loaded")
                if case == "failing loads" and not one["failed_loads"]:
                    faults.append(f"{each['name']}, {case}: no load failed")
    return faults


def _reference_case(case: str) -> str:
    return case if case == "preempting" else "first pass"


def _shares(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> tuple[float, float]:
    pairs = list(zip(answers, expected, strict=True))
    whole = sum(list(one) == list(other) for one, other in pairs)
    first = sum(list(one[:1]) == list(other[:1]) for one, other in pairs)
    return whole / len(pairs), first / len(pairs)


def _equal(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]] | None) -> str:
    if expected is None:
        return "-"
    whole, first = _shares(answers, expected)
    num = len(expected)
    return f"{round(whole * num)} / {round(first * num)} of {num}"
