"""launch/trace_reading.py on traces small enough to be reckoned by hand (times in microseconds, as the profiler writes them)."""

from __future__ import annotations

from typing import Any

import pytest
import trace_reading as tr

Event = dict[str, Any]
CLOCK = 4_986_408_544_976.0  # microseconds: what a real trace's begin looks like


def mark(phase: str, ts: float, dur: float) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": tr.MARK + phase, "ts": CLOCK + ts, "dur": dur, "args": {}}


class Device:
    """Makes a launch and its kernel or copy, tied by a correlation."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def does(
        self, name: str, launched: float, ts: float, dur: float, stream: int = 7, cat: str = "kernel", **args: Any
    ) -> None:
        number = len(self.events)
        call = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaLaunchKernel"
        self.events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": call, "ts": CLOCK + launched, "dur": 2, "args": {"correlation": number}}
        )
        args = {"stream": stream, "correlation": number, **args}
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": CLOCK + ts, "dur": dur, "args": args})


def two_steps() -> dict[str, Any]:
    """Forward 100 and backward 200 us on stream 7, an update of 100 us on stream 9 with copies beside the next forward."""
    device, marks = Device(), []
    for step in range(3):
        t = step * 400.0
        marks += [mark("forward", t, 20), mark("backward", t + 20, 30), mark("step", t + 60, 250)]
        device.does("nvjet_tst_128x256", t + 5, t + 10, 60)
        device.does("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>(...)", t + 8, t + 70, 40)
        device.does("ampere_bf16_s16816gemm_bf16", t + 25, t + 120, 180)  # a gap of 10 us before it
        device.does("_8bit_kernel", t + 70, t + 310, 100, stream=9)
        device.does("Memcpy HtoD (Pinned -> Device)", t + 65, t + 300, 50, 8, "gpu_memcpy", bytes=2_500_000)
        device.does("Memcpy DtoH (Device -> Pinned)", t + 75, t + 390, 40, 10, "gpu_memcpy", bytes=2_000_000)
    return {"traceEvents": [*marks, *device.events]}


def test_phases_steps_and_classes() -> None:
    trace = tr.read(two_steps())
    assert {(w.kind, w.phase) for w in trace.work if w.number == 1} == {
        ("matrix products", "forward"), ("attention", "forward"), ("matrix products", "backward"), ("optimizer", "step"),
        (tr.UP, "step"), (tr.DOWN, "step"),
    }  # fmt: skip
    assert [m[3] for m in trace.marks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_one_period_is_taken_apart() -> None:
    found = tr.report(tr.read(two_steps()), 1)
    us = pytest.approx
    assert found["period_s"] * 1e6 == us(400, abs=0.01)
    # of the window from 410 to 810: kernels of stream 7 take 60 + 40 + 180
    assert found["compute_stream_idle_s"] * 1e6 == us(120, abs=0.01)
    assert found["no_kernel_s"] * 1e6 == us(20, abs=0.01)  # 10 before backward, 10 between it and the update
    assert found["classes"]["optimizer"]["s"] * 1e6 == us(100, abs=0.01)
    up, down = found["bus"][tr.UP], found["bus"][tr.DOWN]
    assert up["gb_per_s"] == us(50, rel=1e-3) and down["gb_per_s"] == us(50, rel=1e-3)
    assert up["beside_kernels"] == us(0.8, abs=1e-3) and up["beside_compute_stream"] == us(0, abs=1e-3)
    # the download of step 0 runs until 430, beside the forward of step 1; that of step 1 begins at 790 beside the update
    assert down["s"] * 1e6 == us(40, abs=0.01) and down["beside_compute_stream"] == us(0.5, abs=1e-3)
    between = found["backward_to_next_forward"]
    assert between["to_first_kernel_s"] * 1e6 == us(110, abs=0.01) == between["to_end_of_update_s"] * 1e6
    assert found["gaps"][0]["s"] * 1e6 == us(10, abs=0.01) and found["gaps"][0]["why"] == "waited on the device"
    assert found["cpu"]["launches"] == 4 and found["cpu"]["copies_s"] * 1e6 == us(4, abs=0.01)
    assert found["cpu_phases_s"]["step"] * 1e6 == us(250, abs=0.01)


def test_the_page_names_what_was_found() -> None:
    page = tr.markdown("title", tr.report(tr.read(two_steps()), 1))
    assert "| attention | 0.0 | 10.0 % |" in page and "| 0.00 | 50.0 | 80 % | 0 % |" in page
    assert "`_8bit_kernel` | optimizer" in page


def test_without_a_device_only_the_cpu_is_reported() -> None:
    marks = [e for e in two_steps()["traceEvents"] if e["cat"] == "user_annotation"]
    found = tr.report(tr.read({"traceEvents": marks}), 1)
    assert set(found) == {"cpu_phases_s"} and "no kernels of a device" in tr.markdown("title", found)


def test_accumulation_is_one_step() -> None:
    marks = [
        mark("forward", 0, 5),
        mark("backward", 10, 5),
        mark("forward", 20, 5),
        mark("backward", 30, 5),
        mark("step", 40, 5),
    ]
    marks += [mark("forward", 50, 5)]
    assert [m[3] for m in tr.read({"traceEvents": marks}).marks] == [0, 0, 0, 0, 0, 1]


def test_spans() -> None:
    joined = tr.union([(3, 4), (0, 1), (0.5, 2), (5, 5)])
    assert joined == [(0, 2), (3, 4)]
    assert tr.common(joined, [(1.5, 3.5)]) == [(1.5, 2), (3, 3.5)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>", "other kernels"),
        ("_elementwise_kernel", "optimizer"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_swiglu_forward_kernel", "other kernels"),
    ],
)
def test_kernels_by_name(name: str, kind: str) -> None:
    assert tr.kind_of("kernel", name) == kind


def test_an_update_kernel_that_forward_launches_first_does_not_begin_the_period() -> None:
    trace = two_steps()
    device = Device()
    device.events = trace["traceEvents"]
    device.does("_8bit_kernel", 401, 402, 2, stream=9)  # launched by the second forward, before its own first kernel
    found = tr.report(tr.read(trace), 1)
    assert found["compute_stream"] == 7 and found["period_s"] == pytest.approx(400e-6, abs=1e-8)


def test_a_timeline_shows_what_runs_beside_what() -> None:
    lines = tr.report(tr.read(two_steps()), 1)["timeline"]
    # A period of 400 us from 410 on, 2.5 us a character: forward to 510 with none between, a gap of 10, backward to 700, nothing to 800.
    assert lines["7"] == "#" * 40 + " " * 4 + "#" * 72 + " " * 44
    assert lines["9"] == "#" * 0 + " " * 120 + "#" * 40 and len(lines["8"]) == tr.COLUMNS
