"""What a text forward costs by our plan, the seed's and plain MLX: counted work and a roofline for Apple GPUs.

Nothing is timed: `egemma_mlx.cost` says what is counted and which parameters are estimates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from egemma_mlx.cost import plans, roofline, seed, traced
from egemma_mlx.cost.devices import DEVICES, LAUNCH_OVERHEADS, Core, Device
from egemma_mlx.cost.plans import PUBLISHED, WORKLOADS, Workload
from egemma_mlx.cost.work import Heads, Work

SEED_ACTIVATIONS = 39_936
"""`activations` of the seed as issue 4 has them, which counts 1,024 elements that its description does not explain."""


@dataclass(frozen=True)
class Plan:
    """The launches of one forward."""

    name: str
    launches: list[Work]

    def total(self, figure: str) -> int:
        return sum(int(getattr(launch, figure)) for launch in self.launches)

    def seconds(self, device: Device, overhead: float) -> float:
        return roofline.total(self.launches, device, overhead)


def forwards(load: Workload) -> list[Plan]:
    """Ours, the seed's, plain MLX operations."""
    return [
        Plan("ours", plans.ours(PUBLISHED, load)),
        Plan("seed", plans.seeds(PUBLISHED, load)),
        Plan("ops", traced.plain(PUBLISHED, load)[0]),
    ]


@dataclass(frozen=True)
class Published:
    """A figure of the seed's author on the M4 with ten cores, and what the model makes of it. TFLOP/s."""

    what: str
    low: float
    high: float
    predicted: float

    @property
    def off(self) -> float:
        """Distance from the published range, as a part of its nearer end."""
        nearest = min(max(self.predicted, self.low), self.high)
        return abs(self.predicted - nearest) / nearest


def published(device: Device = DEVICES["M4"]) -> list[Published]:
    """cortiq's figures (its egemma2.rs, and the comment on eg_flash64s)."""

    def teraflops(work: Work) -> float:
        return work.needed / roofline.time(work, device).seconds / 1e12

    gemm = seed.product("", 4096, 512, 2048, 2048)
    flash = seed.flash(9801, Heads(12, 12, 64))
    return [
        Published("GEMM, 4096×512 · 4096×512ᵀ", 2.6, 2.8, teraflops(gemm)),
        Published("direct flash, 9,801 patches, 12 heads of 64", 0.8, 0.8, teraflops(flash)),
    ]


# Other values of what is estimated about a core.
VARIATIONS = {
    "products at 0.8 of the peak": Core(matrix_ceiling=0.8),
    "products at the peak": Core(matrix_ceiling=1.0),
    "24 B a clock from device memory": Core(load_bytes=24),
    "48 B": Core(load_bytes=48),
    "requests of 4 B at full rate": Core(request_bytes=4),
    "48 B a clock of threadgroup memory": Core(shared_bytes=48),
    "128 B": Core(shared_bytes=128),
}


def activations() -> dict[str, float]:
    """Elements read plus written per token and layer at 32×128, each launch's arrays once, mean over the layers."""
    load = Workload(32, 128)

    def counted(layer: Callable[..., list[Work]]) -> float:
        launches = [launch for kind in PUBLISHED.layers for launch in layer(PUBLISHED, load, kind, last=False)]
        return sum(launch.activations for launch in launches) / len(PUBLISHED.layers) / load.rows

    return {
        "ours": counted(plans.our_layer),
        "seed": counted(plans.seed_layer),
        "seed, as issue 4 counts it": SEED_ACTIVATIONS,
    }


# --- report ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=list(DEVICES), help="one GPU instead of all")
    parser.add_argument("--kernels", action="store_true", help="every kernel of a forward, too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    devices = [DEVICES[arguments.device]] if arguments.device else list(DEVICES.values())
    results = {load: forwards(load) for load in WORKLOADS}
    if arguments.json:
        print(json.dumps(_json(results, devices), indent=2, ensure_ascii=False))
        return
    reports = (_devices(devices), _figures(), _counted(results), _times(results, devices), _varied(results, devices))
    for lines in reports:
        print(*lines, sep="\n", end="\n\n")
    if arguments.kernels:
        for device in devices:
            print(*_kernels(results, device), sep="\n", end="\n\n")


def _row(*cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _devices(devices: Sequence[Device]) -> Iterator[str]:
    yield from _head("device", "cores", "GHz", "f32 TFLOP/s", "of matrix products", "DRAM GB/s", "from")
    for d in devices:
        peaks = (f"{d.peak / 1e12:.2f}", f"{d.matrix_peak / 1e12:.2f}")
        yield _row(d.name, d.cores, f"{d.clock / 1e9:.3f}", *peaks, f"{d.bandwidth / 1e9:g}", d.source)


def _figures() -> Iterator[str]:
    yield from _head("the seed on the M4", "published TFLOP/s", "model", "off")
    for figure in published():
        said = f"{figure.low:g}–{figure.high:g}" if figure.low < figure.high else f"{figure.low:g}"
        yield _row(figure.what, said, f"{figure.predicted:.2f}", f"{figure.off:.0%}")
    counts = activations()
    yield ""
    yield "Activation elements read plus written per token and layer at 32×128: " + ", ".join(
        f"{name} {count:,.0f}" for name, count in counts.items()
    )
    yield f"(ours / seed {counts['ours'] / counts['seed']:.3f})"


def _counted(results: dict[Workload, list[Plan]]) -> Iterator[str]:
    yield from _head(
        "workload",
        "plan",
        "launches",
        "GFLOP needed",
        "executed / needed",
        "GB asked for by lanes",
        "GB of distinct arrays",
        "/ least",
        "GB through threadgroup memory",
    )
    for load, forward in results.items():
        least = plans.least_bytes(PUBLISHED, load)
        for plan in forward:
            needed = plan.total("needed")
            yield _row(
                load.name,
                plan.name,
                len(plan.launches),
                f"{needed / 1e9:,.1f}",
                f"{plan.total('executed') / needed:.3f}",
                f"{plan.total('device_bytes') / 1e9:.2f}",
                f"{plan.total('unique_bytes') / 1e9:.2f}",
                f"{plan.total('unique_bytes') / least:.2f}",
                f"{plan.total('threadgroup_bytes') / 1e9:.2f}",
            )


def _times(results: dict[Workload, list[Plan]], devices: Sequence[Device]) -> Iterator[str]:
    names = [plan.name for plan in next(iter(results.values()))]
    ratios = [f"{name} / {names[0]}" for name in names[1:]]
    yield from _head("workload", "device", "µs a launch", *(f"{name} ms" for name in names), *ratios)
    for load, forward in results.items():
        for device in devices:
            for overhead in LAUNCH_OVERHEADS:
                times = [plan.seconds(device, overhead) for plan in forward]
                yield _row(
                    load.name,
                    device.name,
                    f"{overhead * 1e6:g}",
                    *(f"{time * 1e3:,.2f}" for time in times),
                    *(f"{time / times[0]:.2f}" for time in times[1:]),
                )


def _varied(results: dict[Workload, list[Plan]], devices: Sequence[Device]) -> Iterator[str]:
    """How much of the seed / ours depends on the estimates: least and greatest over devices and overheads."""
    names = (f"{load.name}: seed / ours" for load in results)
    yield from _head("if instead", *(f"{figure.what}: TFLOP/s" for figure in published()), *names)
    for name, core in VARIATIONS.items():
        ranges = []
        for ours, seeds, *_ in results.values():
            ratios = [
                seeds.seconds(changed, overhead) / ours.seconds(changed, overhead)
                for changed in (replace(device, core=core) for device in devices)
                for overhead in LAUNCH_OVERHEADS
            ]
            ranges.append(f"{min(ratios):.2f}–{max(ratios):.2f}")
        figures = published(replace(DEVICES["M4"], core=core))
        yield _row(name, *(f"{figure.predicted:.2f}" for figure in figures), *ranges)


def _kernels(results: dict[Workload, list[Plan]], device: Device) -> Iterator[str]:
    yield from _head(
        "workload", "plan", f"kernel ({device.name})", "launches", "threadgroups", "executed / needed", "ms", "limit"
    )
    for load, forward in results.items():
        for plan in forward:
            for kernel in _kernel_rows(plan, device):
                executed = f"{kernel['executed'] / kernel['needed']:.3f}" if kernel["needed"] else ""
                yield _row(
                    load.name,
                    plan.name,
                    kernel["kernel"],
                    kernel["launches"],
                    f"{kernel['threadgroups']:,}",
                    executed,
                    f"{kernel['seconds'] * 1e3:.3f}",
                    kernel["limit"],
                )


_SUMS = ("threadgroups", "needed", "executed", "device_bytes", "unique_bytes", "threadgroup_bytes", "activations")


def _kernel_rows(plan: Plan, device: Device) -> Iterator[dict[str, Any]]:
    """A plan's launches by kernel, without their overhead; `limit` is what limits most of the time."""
    for name in dict.fromkeys(launch.kernel for launch in plan.launches):
        same = [launch for launch in plan.launches if launch.kernel == name]
        times = [roofline.time(launch, device) for launch in same]
        yield {
            "kernel": name,
            "launches": len(same),
            **{figure: Plan(name, same).total(figure) for figure in _SUMS},
            "seconds": sum(time.seconds for time in times),
            "limit": max(times, key=lambda time: time.seconds).limit,
        }


def _json(results: dict[Workload, list[Plan]], devices: Sequence[Device]) -> dict[str, Any]:
    return {
        "devices": [{**asdict(device), "peak": device.peak, "matrix_peak": device.matrix_peak} for device in devices],
        "published": [{**asdict(figure), "off": figure.off} for figure in published()],
        "activations": activations(),
        "forwards": [
            {
                "workload": load.name,
                "plan": plan.name,
                "launches": len(plan.launches),
                **{figure: plan.total(figure) for figure in _SUMS},
                "least_bytes": plans.least_bytes(PUBLISHED, load),
                "seconds": {
                    device.name: {
                        f"{overhead * 1e6:g} us": plan.seconds(device, overhead) for overhead in LAUNCH_OVERHEADS
                    }
                    for device in devices
                },
                "kernels": {device.name: list(_kernel_rows(plan, device)) for device in devices},
            }
            for load, forward in results.items()
            for plan in forward
        ],
    }
