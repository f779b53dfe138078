"""What reaches the driver when a kernel is launched again; the driver of these tests only records its calls."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from deltazoo.ops.triton import launch as launching  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="with TRITON_INTERPRET=1 Triton cannot compile"
)


@triton.jit(do_not_specialize=["n"])
def scale_kernel(x, offset, out, n, factor, BLOCK: tl.constexpr):
    """`out = factor * x + offset` (None: zero)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + i, mask=i < n) * factor
    if offset is not None:
        y += tl.load(offset + i, mask=i < n)
    tl.store(out + i, y, mask=i < n)


class Recorder:
    """Stands in for Triton's driver, and for the function in C that Triton's own launchers call."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.encoded: list[int] = []
        self.unloaded: list[int] = []
        self.device, self.stream, self.loaded = 0, 7, 0
        self.utils = SimpleNamespace(
            load_binary=self.load,
            unload_module=self.unloaded.append,
            get_device_properties=lambda _: {"max_shared_mem": 232_448},
            launch=self.launch,
            build_signature_metadata=tuple,
            fill_tma_descriptor=self.encode,
            fill_tma_descriptor_tiled=self.encode,
        )

    def load(self, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return self.loaded, 1000 + self.loaded, 32, 0, 1024

    def encode(self, address: int, *tile: Any) -> list[Any]:
        self.encoded.append(address)
        return [address, *(list(x) if isinstance(x, tuple) else x for x in tile)]

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launch(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        if hasattr(nvidia, "make_kernel_signature"):  # one function for all kernels
            *flags, packed, data, enter, leave, scratch, profile, annotations, signature, arguments = rest
            options = (*flags, packed, scratch, profile, annotations, signature)
            assert len(arguments) == len(annotations)
        else:  # Triton 3.6, which compiles one for each signature
            *flags, scratch, profile, packed, data, enter, leave = rest[:8]
            options, arguments = (*flags, packed, scratch, profile), rest[8:]
        if enter is not None:
            enter(data)
        given = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        self.launches.append(((x, y, z), stream, function, options, given))
        if leave is not None:
            leave(data)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    stand_ins = {
        "compile_module_from_src": lambda **_: recorder.utils,  # Triton 3.6; what follows is of later versions
        "library_dirs": list,
        "PyKernelArg": lambda **named: named,
        **{name: name for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE")},
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(nvidia, name, stand_in, raising=False)
    forget()
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(recorder)
    yield recorder
    forget()  # while this driver can unload what nobody holds any more
    triton.runtime.driver.set_active(previous)


def forget() -> None:
    """Drop compiled kernels."""
    constants.cache_clear()
    scale_kernel.device_caches.clear()
    gc.collect()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever Triton is asked to launch."""
    calls: list[str] = []
    run = JITFunction.run

    def counted(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counted)
    return calls


def tensors(dtype: torch.dtype = torch.float32, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors of 64 elements, the first one `first` elements behind an aligned address."""
    x, offset, out = (torch.zeros(64 + 16, dtype=dtype) for _ in range(3))
    return x[first : 64 + first], offset[:64], out[:64]


@lru_cache
def constants(**changes: Any) -> launching.Constants:
    return launching.Constants(2, **dict(n=64, factor=0.5, BLOCK=32, num_warps=1) | changes)


def scale(x: Tensor, offset: Tensor | None, out: Tensor, **changes: Any) -> None:
    launching.launch(scale_kernel, constants(**changes), x, offset, out)


def test_this_triton_is_known() -> None:
    """Compare CompiledKernel.run in a new version with `launch` before its number is added there."""
    assert launching.DIRECT, f"nobody has looked at Triton {triton.__version__} yet"


@pytest.mark.parametrize("with_offset", [True, False])
@pytest.mark.parametrize("options", [{}, {"n": 1}, {"n": 2**40}, {"launch_pdl": True}], ids=str)
def test_second_launch_reaches_the_driver_unchanged(
    options: dict[str, int], with_offset: bool, driver: Recorder, asked: list[str]
) -> None:
    x, offset, out = tensors()
    for _ in range(3):
        scale(x, offset if with_offset else None, out, **options)
    assert len(asked) == 1
    first, second, third = driver.launches
    assert first == second == third
    addresses = x.data_ptr(), offset.data_ptr() if with_offset else None, out.data_ptr()
    assert second[0] == (2, 1, 1) and second[1] == 7
    assert second[4] == (*addresses, options.get("n", 64), 0.5, 32)
    assert second[3][:2] == (False, options.get("launch_pdl", False))


def test_other_tensors_and_another_stream(driver: Recorder, asked: list[str]) -> None:
    scale(*tensors())
    driver.stream = 8
    other = tensors()
    scale(*other)
    assert len(asked) == 1
    assert driver.launches[1][1] == 8 and driver.launches[1][4][:3] == tuple(t.data_ptr() for t in other)


def test_what_triton_compiles_anew_is_another_launch(driver: Recorder, asked: list[str]) -> None:
    """Dtypes, None, constants, options, and the device: each has a kernel of its own."""
    x, half = tensors(), tensors(torch.float16)
    calls = [
        lambda: scale(*x),
        lambda: scale(*half),
        lambda: scale(x[0], x[1], half[2]),
        lambda: scale(x[0], None, x[2]),
        lambda: scale(*x, n=2**40),
        lambda: scale(*x, BLOCK=64),
        lambda: scale(*x, num_warps=2),
    ]
    for _ in range(2):
        for call in calls:
            call()
    driver.device = 1
    for _ in range(2):
        scale(*x)
    assert len(asked) == len(calls) + 1
    functions = [function for _, _, function, *_ in driver.launches]
    assert functions[: len(calls)] == functions[len(calls) : 2 * len(calls)]
    assert functions[-1] == functions[-2] and len(set(functions)) == len(calls) + 1


def test_unaligned_tensors_go_through_triton(driver: Recorder, asked: list[str]) -> None:
    scale(*tensors())
    for _ in range(2):
        scale(*tensors(first=1))
    assert len(asked) == 3
    aligned, *unaligned = [function for _, _, function, *_ in driver.launches]
    assert aligned not in unaligned
    scale(*tensors(first=4))  # 16 bytes further: aligned
    assert len(asked) == 3 and driver.launches[-1][2] == aligned


@pytest.mark.parametrize("chained", [True, False])
def test_launch_hooks_see_every_launch(
    chained: bool, driver: Recorder, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def hook(when: str) -> Any:
        return lambda metadata: seen.append((when, metadata.get()["name"]))

    x = tensors()
    scale(*x)
    scale(*x)
    with monkeypatch.context() as patch:
        for name, when in (("launch_enter_hook", "enter"), ("launch_exit_hook", "exit")):
            hooks = knobs.HookChain()
            hooks.add(hook(when))
            patch.setattr(knobs.runtime, name, hooks if chained else hook(when))
        scale(*x)
        scale(*x)
    assert seen == [("enter", "scale_kernel"), ("exit", "scale_kernel")] * 2
    assert len(asked) == 3
    scale(*x)
    assert len(asked) == 3 and len(seen) == 4


def test_other_ways_to_watch_go_through_triton(
    driver: Recorder, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = tensors()
    scale(*x)
    seen: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(scale_kernel, "pre_run_hooks", [lambda *_, **named: seen.append(named["n"])])
        scale(*x)
    assert seen == [64] and len(asked) == 2
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "debug", True)
        scale(*x)
    assert len(asked) == 3 and driver.launches[-1][2] != driver.launches[0][2]  # with assertions compiled in
    with monkeypatch.context() as patch:
        patch.setattr(launching, "DIRECT", False)  # as with an unknown version
        scale(*x)
    assert len(asked) == 4
    scale(*x)
    assert len(asked) == 4 and driver.launches[-1] == driver.launches[0]


def test_what_is_no_kernel_of_triton_is_called_plainly(driver: Recorder) -> None:
    """As kernels under the interpreter, and those of tests."""
    seen: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *tensors, **constants: seen.append((grid, tensors, constants))

    launching.launch(Kernel(), launching.Constants(3, n=1), None)
    assert seen == [((3,), (None,), {"n": 1, "enable_fp_fusion": True})] and not driver.launches


def test_threads_launch_what_they_asked_for(driver: Recorder) -> None:
    x = tensors()
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(scale, *x, n=i % 7) for i in range(400)]:
            done.result()
    assert sorted(given[3] for *_, given in driver.launches) == sorted(i % 7 for i in range(400))


@pytest.mark.parametrize("of_nvidia", [True, False])
def test_launchers_that_do_more_stay_with_triton(of_nvidia: bool, driver: Recorder, asked: list[str]) -> None:
    """That of a kernel that wants memory, and one that is not known."""

    class WithMemory(nvidia.CudaLauncher):
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self.global_scratch_size = 1

        def __call__(self, *_: Any) -> None:
            """Would take the memory from an allocator."""

    driver.launcher_cls = WithMemory if of_nvidia else lambda *_: lambda *_: None
    for _ in range(3):
        scale(*tensors())
    assert len(asked) == 3 and not driver.launches


def test_kernels_stay_loaded_while_they_are_kept(driver: Recorder, asked: list[str]) -> None:
    """Since 3.8 Triton unloads a kernel that nobody holds any more."""
    x = tensors()
    scale(*x)
    scale_kernel.device_caches.clear()
    gc.collect()
    assert not driver.unloaded
    scale(*x)
    assert len(asked) == 1 and driver.launches[0] == driver.launches[1]
    forget()
    assert driver.unloaded == ([1] if hasattr(CompiledKernel, "__del__") else [])


def test_products_are_fused_whatever_tritons_default(driver: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are tuned and tested so; Triton 3.9 warns where a launch says nothing, since its default will change."""
    monkeypatch.setattr(knobs.language, "default_fp_fusion", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale(*tensors())
    (compiled,) = scale_kernel.device_caches[0][0].values()
    assert compiled.metadata.enable_fp_fusion and "fma.rn.f32" in compiled.asm["ptx"]


def test_tiles_are_encoded_once_for_an_address(
    driver: Recorder, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again for another address, and where too many are kept; what is passed is always that of the tensor."""
    gluon = pytest.importorskip("deltazoo.ops.triton.gluon")
    if gluon.MISSING is not None:
        pytest.skip(gluon.MISSING)

    @gluon.jit
    def tiles_kernel(first, x, nothing, second, n):
        pass

    monkeypatch.setattr(launching, "MOST_ENCODED", 2)
    fixed, x, constants = torch.zeros(1, 64, 2, 64, dtype=torch.float16), torch.zeros(16), launching.Constants(1, n=5)
    several = [torch.zeros(1, 64, 2, 64, dtype=torch.float16) for _ in range(3)]
    for second in (several[0], *several, several[0]):
        tiles = gluon.token_tiles(fixed, 64), x, None, gluon.token_tiles(second, 64)
        launching.launch(tiles_kernel, constants, *tiles)
    assert len(asked) == 1 and len(driver.launches) == 5
    first, again, *others, last = driver.launches
    assert first == again == last and len({str(launch) for launch in driver.launches}) == 3
    # Triton's own launch, then the first address of each, then two others, of which the last one makes room.
    addresses = [second.data_ptr() for second in several]
    assert [a for a in driver.encoded if a != fixed.data_ptr()] == [addresses[0], *addresses, addresses[0]]
    assert driver.encoded.count(fixed.data_ptr()) == 2
