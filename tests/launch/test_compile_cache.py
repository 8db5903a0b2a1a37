"""The one way of native code: compiled once, kept where only its user writes, loaded, and compiled anew where it must.

The library here is three lines of C, which the machine's C compiler makes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_sparse_mla import packages
from jax_sparse_mla.launch import compile_cache

pytestmark = pytest.mark.skipif(compile_cache.find_compiler("c") is None, reason="needs a C compiler")

GOOD, PLANTED = "int answer(void) { return 42; }\n", "int answer(void) { return 13; }\n"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache; each test is warned anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packages.warn_once.cache_clear()
    return tmp_path / "cache" / "jax_sparse_mla"


@pytest.fixture
def library(tmp_path):
    source = tmp_path / "answer.c"
    source.write_text(GOOD)
    return compile_cache.Library("answer", (source,), "c", ("-O1",), packages=("numpy",))


def answer(library) -> int:
    return compile_cache.load(library, lambda path: ctypes.CDLL(str(path))).answer()


def compile_planted(tmp_path, path):
    """Somebody else's library in the place of ours."""
    source = tmp_path / "planted.c"
    source.write_text(PLANTED)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)


def no_compiler(monkeypatch):
    monkeypatch.setattr(compile_cache, "find_compiler", lambda kind: None)


def add_compiler(monkeypatch, tmp_path, text) -> None:
    program = tmp_path / "compiler"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o700)
    monkeypatch.setenv("CC", str(program))


def test_it_is_compiled_once_into_a_folder_of_the_user_s_own(library, cache, monkeypatch, recwarn):
    assert answer(library) == 42
    (path,) = cache.iterdir()  # what the compiler left is gone
    assert path.name.startswith("answer-") and path.suffix == ".so"
    assert cache.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compile_cache, "compile_to", lambda *args: pytest.fail("compiled again"))
    assert answer(library) == 42
    assert not recwarn.list


def test_without_a_compiler_the_cached_one_serves(library, monkeypatch):
    assert answer(library) == 42
    no_compiler(monkeypatch)
    assert compile_cache.available(library) and answer(library) == 42


def test_without_a_compiler_and_a_cached_one_the_next_step_is_said(library, monkeypatch):
    no_compiler(monkeypatch)
    assert not compile_cache.available(library)
    with pytest.raises(RuntimeError, match=r"answer has to be compiled, and none of cc, gcc, clang .* CC"):
        answer(library)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "echo unknown dialect >&2; exit 1",
            r"(?s)cannot be compiled: .*unknown dialect.*The command was .*-O1",
        ),
        (None, "compiler does not run"),
        ('while [ "$1" != -o ]; do shift || exit 1; done; echo junk > "$2"', "was compiled and does not load: OSError"),
    ],
)
def test_what_goes_wrong_is_told(library, cache, monkeypatch, tmp_path, text, message):
    add_compiler(monkeypatch, tmp_path, text)
    if text is None:
        (tmp_path / "compiler").write_text("no program")
    with pytest.raises(RuntimeError, match=message):
        answer(library)
    assert "dialect" not in message or not list(cache.iterdir())


def test_the_name_tells_all_that_the_binary_depends_on(library, monkeypatch, tmp_path):
    """Each change makes another name: nothing is taken for what it is not."""
    names = [compile_cache._file_name(library)]

    def changed(library=library):
        names.append(compile_cache._file_name(library))

    changed(dataclasses.replace(library, flags=("-O0",)))
    changed(dataclasses.replace(library, compiler="c++"))
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.platform, "machine", lambda: "another")
        changed()
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "version", lambda name: "0.0.0")
        changed()
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.platform, "python_version", lambda: "3.99")
        changed()
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "_version_of", lambda program: "version 99")
        changed()
    with monkeypatch.context() as patch:
        patch.setenv("CC", f"{shutil.which('cc')} -m32")
        changed()
    header = tmp_path / "answer.h"
    header.write_text("// included\n")
    changed(dataclasses.replace(library, sources=(*library.sources, header)))
    library.sources[0].write_text(PLANTED)
    changed()
    assert len(set(names)) == len(names) == 10


@pytest.mark.parametrize("variable", ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"])
def test_nvcc_s_own_variables_count(library, monkeypatch, variable):
    library = dataclasses.replace(library, compiler="nvcc")
    before = compile_cache._file_name(library)
    monkeypatch.setenv(variable, "-G")
    assert compile_cache._file_name(library) != before


@pytest.mark.parametrize("content", [b"", b"no library"], ids=["cut short", "of another kind"])
def test_what_does_not_load_is_compiled_anew(library, cache, content):
    cache.mkdir(parents=True, mode=0o700)
    path = cache / compile_cache._file_name(library)
    path.write_bytes(content)
    path.chmod(0o700)
    assert answer(library) == 42
    assert list(cache.iterdir()) == [path] and path.stat().st_size > 100


class TestWhatOthersCouldHavePlanted:
    @pytest.fixture
    def planted(self, library, cache, tmp_path):
        """Their library, under the right name."""
        cache.mkdir(parents=True, mode=0o700)
        path = cache / compile_cache._file_name(library)
        compile_planted(tmp_path, path)
        path.chmod(0o700)
        return path

    def test_the_user_s_own_folder_is_trusted(self, library, planted):
        """What the tests below refuse would be loaded: they test something."""
        assert answer(library) == 13

    @pytest.mark.parametrize("why", [0o777, 0o1777, 0o770, 0o702, "another user's", "a link"])
    def test_a_folder_that_others_write_is_not_used(self, library, planted, cache, monkeypatch, why):
        user = os.geteuid()
        if why == "another user's":
            monkeypatch.setattr(compile_cache.os, "geteuid", lambda: user + 1)
            words = f"user {user} owns it"
        elif why == "a link":
            cache.symlink_to(cache.rename(cache.with_name("elsewhere")))
            words = "nor may it be a symbolic link"
        else:
            cache.chmod(why)
            words = f"process alone: .*mode {why:o} lets others write.*remove it"
        with pytest.warns(UserWarning, match=words):
            assert answer(library) == 42
        assert [path.name for path in cache.iterdir()] == [planted.name], "nothing was written there"

    def test_a_folder_that_others_only_read_is_closed(self, library, planted, cache):
        cache.chmod(0o755)
        answer(library)
        assert cache.stat().st_mode & 0o777 == 0o700

    def test_a_folder_around_it_in_which_everyone_renames_is_not_used(self, library, planted, cache):
        cache.parent.chmod(0o777)
        with pytest.warns(UserWarning, match="everyone may replace .* XDG_CACHE_HOME"):
            assert answer(library) == 42
        cache.parent.chmod(0o1777)  # as /tmp: only the owner renames
        assert answer(library) == 13

    @pytest.mark.parametrize("mode", [0o777, 0o720])
    def test_a_file_that_others_write_is_compiled_anew(self, library, planted, cache, mode):
        planted.chmod(mode)
        with pytest.warns(UserWarning, match="is not loaded, its mode .* compiled anew"):
            assert answer(library) == 42
        assert list(cache.iterdir()) == [planted] and answer(library) == 42

    def test_a_symbolic_link_to_a_file_is_replaced(self, library, planted, tmp_path):
        elsewhere = planted.rename(tmp_path / "theirs.so")
        planted.symlink_to(elsewhere)
        with pytest.warns(UserWarning, match="is not loaded, it is no plain file"):
            assert answer(library) == 42
        assert planted.is_file() and not planted.is_symlink() and elsewhere.is_file()

    def test_without_a_compiler_it_is_not_loaded_either(self, library, planted, cache, monkeypatch):
        cache.chmod(0o777)
        no_compiler(monkeypatch)
        assert not compile_cache.available(library)
        with pytest.raises(RuntimeError, match=r"(?s)answer has to be compiled.*lets others write"):
            answer(library)


@pytest.mark.parametrize("obstacle", ["a file", "no home"])
def test_a_cache_that_takes_no_files_does_not_matter(library, cache, monkeypatch, obstacle):
    if obstacle == "a file":
        cache.parent.mkdir()
        cache.write_text("not a folder")
    else:

        def no_home(self):
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(compile_cache.Path, "expanduser", no_home)
    assert compile_cache.available(library)
    with pytest.warns(UserWarning, match="this process alone: .*(it is no folder|Could not determine home directory)"):
        assert answer(library) == 42
    assert obstacle == "no home" or cache.read_text() == "not a folder"


def test_processes_that_need_it_at_once_compile_it_once(library, cache, tmp_path):
    log = tmp_path / "log"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ echo run >> {log}; sleep 0.3; }}\nexec cc "$@"\n')
    compiler.chmod(0o700)
    program = (
        "import ctypes; from pathlib import Path; from jax_sparse_mla.launch import compile_cache; "
        f"library = compile_cache.Library('answer', (Path({str(library.sources[0])!r}),), 'c'); "
        "assert compile_cache.load(library, lambda path: ctypes.CDLL(str(path))).answer() == 42"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CC": str(compiler)}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert log.read_text() == "run\n" and len(list(cache.iterdir())) == 1


def slow_compiler(monkeypatch, tmp_path, meets: int) -> None:
    """A compiler of C that does not go on before so many of it run."""
    running = tmp_path / "running"
    running.mkdir()
    add_compiler(
        monkeypatch,
        tmp_path,
        f"""[ "$1" = --version ] && exec cc "$@"
case "$*" in *" -c "*|*.c" "*) touch {running}/$$; tries=0
while [ $(ls {running} | wc -l) -lt {meets} ]; do sleep 0.05; tries=$((tries + 1)); [ $tries -lt 200 ] || exit 1; done
esac
exec cc "$@\"""",
    )


def test_libraries_are_compiled_side_by_side(library, cache, monkeypatch, tmp_path):
    slow_compiler(monkeypatch, tmp_path, meets=2)
    another = dataclasses.replace(library, name="another")
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(answer, [library, another])) == [42, 42]
    assert len(list(cache.iterdir())) == 2


def test_files_of_a_library_are_compiled_side_by_side_and_linked(library, cache, monkeypatch, tmp_path):
    slow_compiler(monkeypatch, tmp_path, meets=2)
    library.sources[0].write_text('#include "half.h"\nint answer(void) { return 2 * half(); }\n')
    half, header = tmp_path / "half.c", tmp_path / "half.h"
    header.write_text("int half(void);\n")
    half.write_text('#include "half.h"\nint half(void) { return 21; }\n')
    library = dataclasses.replace(library, sources=(*library.sources, half, header))
    assert answer(library) == 42 and len(list(cache.iterdir())) == 1
    half.write_text("no C\n")
    with pytest.raises(RuntimeError, match=r"(?s)cannot be compiled.*half\.c"):
        answer(library)


def test_threads_that_need_it_at_once_compile_it_once(library, cache, monkeypatch):
    compiled, compile_to = [], compile_cache.compile_to

    def slowly(*args):
        compiled.append(args)
        time.sleep(0.2)
        return compile_to(*args)

    monkeypatch.setattr(compile_cache, "compile_to", slowly)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(answer, [library] * 3)) == [42] * 3
    assert len(compiled) == 1 and len(list(cache.iterdir())) == 1


def test_a_lock_that_a_killed_process_left_holds_nobody_up(library, cache):
    cache.mkdir(parents=True, mode=0o700)
    (cache / f".{compile_cache._file_name(library)}.lock").touch()
    assert answer(library) == 42 and len(list(cache.iterdir())) == 1


def test_the_package_s_own_needs_no_compiler_and_no_home(library, monkeypatch, tmp_path):
    library = dataclasses.replace(library, carried=tmp_path / "package")
    library.carried.mkdir()
    compile_cache.compile_to(library, compile_cache.carried_path(library))
    no_compiler(monkeypatch)
    monkeypatch.setattr(compile_cache, "private_folder", lambda: pytest.fail("a home is asked for"))
    assert compile_cache.available(library) and answer(library) == 42


def test_the_package_s_own_of_other_sources_is_not_taken(library, tmp_path):
    library = dataclasses.replace(library, carried=tmp_path)
    compile_planted(tmp_path, compile_cache.carried_path(library))
    assert answer(library) == 13
    library.sources[0].write_text(GOOD + "\n")
    assert answer(library) == 42


def test_one_of_the_package_s_that_does_not_load_is_compiled_anew(library, tmp_path):
    library = dataclasses.replace(library, carried=tmp_path)
    compile_cache.carried_path(library).write_text("no library")
    with pytest.warns(UserWarning, match="does not load .*compiled anew"):
        assert answer(library) == 42


def test_a_python_extension_is_loaded_by_its_name(library, tmp_path):
    library.sources[0].write_text(
        '#include <Python.h>\nstatic struct PyModuleDef definition = {.m_name = "some_name", .m_size = -1};\n'
        "PyMODINIT_FUNC PyInit_some_name(void) { return PyModule_Create(&definition); }\n"
    )
    library = dataclasses.replace(library, includes=lambda: [sysconfig.get_config_var("INCLUDEPY")])
    assert compile_cache.load(library, compile_cache.python_extension("some_name")).__name__ == "some_name"
