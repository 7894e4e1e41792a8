"""The compiler: the page kernel for every kind of GPU, without one, and what is said when something is wrong."""

import re
import subprocess
import sys
from functools import partial

import pytest

from kvmoor.devices.cuda.compiler import (
    DEFAULT_OPTIONS,
    choose_architecture,
    compile_source,
    compiler_version,
    page_copy_source,
)
from kvmoor.devices.cuda.launches import VARIANTS
from kvmoor.errors import DeviceError, MissingDependencyError

REGISTERS = 65_536
"""What a multiprocessor has, from compute capability 5.0 on (CUDA C++ Programming Guide, Compute Capabilities)."""


@pytest.fixture
def nvrtc():
    """Ask for NVRTC, which needs no GPU."""
    return pytest.importorskip("cuda.bindings.nvrtc", reason="needs the CUDA bindings for Python and NVRTC")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)], ids=str)
def test_the_page_kernel_compiles_without_spills(nvrtc, capability, caplog):
    """Every variant that an architecture has is there, twice; no register is kept in memory, and a block fits."""
    architecture = f"sm_{capability[0]}{capability[1]}"
    with caplog.at_level("DEBUG", "kvmoor"):
        compiled = compile_source(page_copy_source(), architecture, options=(*DEFAULT_OPTIONS, "--ptxas-options=-v"))

    assert compiled.startswith(b"\x7fELF")
    reports = dict(re.findall(r"entry function '(\w+)'(.*?)(?=Compiling|\Z)", caplog.text, re.DOTALL))
    variants = [variant for variant in VARIANTS if variant.min_capability <= capability]
    assert {name for each in variants for name in (each.small_function, each.large_function)} == set(reports)
    for variant in variants:
        for name in (variant.small_function, variant.large_function):
            assert name.encode() in compiled
            assert ["0", "0"] == re.findall(r"(\d+) bytes spill", reports[name])
            (registers,) = re.findall(r"Used (\d+) registers", reports[name])
            assert int(registers) * variant.threads_per_block <= REGISTERS


def test_the_page_kernel_compiles_without_warnings(nvrtc, caplog):
    """NVRTC has nothing to say about the source."""
    with caplog.at_level("DEBUG", "kvmoor"):
        compile_source(page_copy_source(), "sm_90")
    assert [] == caplog.messages


def test_the_accesses_of_the_page_kernel_can_be_replaced(nvrtc):
    """Other loads and stores can be given, to be measured, and they are what the code then has."""
    hints = '-DLOAD="ld.volatile.global"', '-DSTORE="st.global.wt"'
    ptx = compile_source(page_copy_source(), "compute_90", options=(*DEFAULT_OPTIONS, *hints))
    assert ptx.count(b"ld.volatile.global.v4.u32") >= 4 + 8 + 16
    assert ptx.count(b"st.global.wt.v4.u32") >= 4 + 8 + 16


def test_a_virtual_architecture_gives_ptx(nvrtc):
    """For a GPU newer than NVRTC the result is text that the driver translates, ended as it expects."""
    ptx = compile_source('extern "C" __global__ void nothing() {}', "compute_90")
    assert b".target sm_90" in ptx
    assert b".entry nothing" in ptx
    assert ptx.endswith(b"\0")


def test_a_mistake_is_reported_with_the_compilers_words(nvrtc):
    """The error names file, line, architecture, options and NVRTC's version."""
    with pytest.raises(DeviceError) as caught:
        compile_source("\nint mistake(", "sm_90", name="latch.cu")
    for words in (
        "latch.cu(2): error",
        "sm_90",
        "--std=c++17",
        f"NVRTC {compiler_version()}",
        "NVRTC_ERROR_COMPILATION",
    ):
        assert words in str(caught.value)


def test_an_unknown_architecture_is_reported(nvrtc):
    """What NVRTC does not know is an error with its own words."""
    with pytest.raises(DeviceError, match=r"sm_12345(.|\n)*invalid value for --gpu-architecture"):
        compile_source("", "sm_12345")


class ScriptedNvrtc:
    """Knows some architectures."""

    @staticmethod
    def nvrtcVersion():  # noqa: N802 - as the bindings call it
        return 0, 13, 0

    @staticmethod
    def nvrtcGetSupportedArchs():  # noqa: N802 - as the bindings call it
        return 0, [75, 80, 86, 90, 100, 120]


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((7, 5), "sm_75"),
        ((8, 9), "sm_86"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((11, 0), "compute_100"),
        ((13, 2), "compute_120"),
    ],
)
def test_the_architecture_is_the_gpus_own_or_one_whose_code_it_runs(monkeypatch, capability, architecture):
    """An unknown GPU gets the code of a lower minor version, and PTX if not even its major version is known."""
    monkeypatch.setattr("kvmoor.devices.cuda.compiler._load", ScriptedNvrtc)
    assert architecture == choose_architecture(*capability)


def test_a_gpu_that_is_too_old_is_refused(monkeypatch):
    """The error says what the GPU has and what the compiler wants."""
    monkeypatch.setattr("kvmoor.devices.cuda.compiler._load", ScriptedNvrtc)
    with pytest.raises(DeviceError, match=r"compute capability 7\.0, and NVRTC 13\.0 compiles from 7\.5 on"):
        choose_architecture(7, 0)


def test_this_nvrtc_knows_the_gpus_that_kvmoor_is_made_for(nvrtc):
    """Each gets code of its own, which needs nothing of the driver but loading."""
    assert ["sm_80", "sm_90", "sm_100"] == [choose_architecture(*each) for each in ((8, 0), (9, 0), (10, 0))]


def test_without_nvrtc_the_error_names_the_command(monkeypatch):
    """Whatever needs the compiler says how to install it."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    for call in (compiler_version, partial(compile_source, "", "sm_90"), partial(choose_architecture, 9, 0)):
        with pytest.raises(MissingDependencyError, match=r'NVRTC.*pip install "kvmoor\[cuda\]"'):
            call()


def test_a_library_that_cannot_be_loaded_is_a_missing_dependency(nvrtc, monkeypatch):
    """The bindings without the library, whose own error differs from version to version, lead to the same words."""

    def refuse():
        raise RuntimeError("no libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", refuse)
    with pytest.raises(MissingDependencyError, match=r"no libnvrtc\.so\.13"):
        compiler_version()


def test_importing_the_compiler_loads_no_gpu_code():
    """Only compiling imports the bindings."""
    code = "import sys, kvmoor.devices.cuda.compiler; sys.exit('cuda' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode
