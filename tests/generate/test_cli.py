"""The command `jax-sparse-mla`: exit statuses, and what is printed. test_presets.py has the real presets end to end."""

import collections
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import jax
import pytest
from attention_calls import pretend_installed

from jax_sparse_mla import DeviceInfo, packages
from jax_sparse_mla.attention import machine
from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.hopper.prefill import alone
from jax_sparse_mla.backend import KERNEL_UNUSABLE
from jax_sparse_mla.cli import checks, doctor, generation, main, report, setup
from jax_sparse_mla.serving import presets as texts
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.speculative import Difference

HAS_MODELS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
needs_models = pytest.mark.skipif(not HAS_MODELS, reason="needs torch and transformers")
needs_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="describes a machine without a GPU")


def run(capsys, *args):
    """The exit status of `jax-sparse-mla *args`, and what it printed."""
    status = main(list(args))
    out, err = capsys.readouterr()
    return status, out, err


def python(code, *args):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment, timeout=120
    )


# doctor


def pretend_gpu(monkeypatch, *installed):
    """An H100 with these backends; no top-k kernel is compiled for it."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: DeviceInfo("cuda", (9, 0), 132, 232448))
    monkeypatch.setattr(doctor.topk, "missing", dict)
    pretend_installed(monkeypatch, *installed)


@needs_cpu
def test_doctor_names_every_backend_with_a_reason(capsys):
    status, out, _ = run(capsys, "doctor", "--verbose")
    assert status == 0
    assert re.search(r"^device +cpu \(\d+ device", out, re.M) and f"jax {jax.__version__}" in out
    listed = re.findall(r"^backend +(\w+) +(.+)$", out, re.M)
    assert [name for name, _ in listed] == list(BACKENDS) and all(state for _, state in listed)
    plans = re.split(r"^(?=DeepSeek)", out, flags=re.M)[1:]
    assert len(plans) == 6
    for plan, (model, phase) in zip(
        plans, [(m, p) for m in ("V3.2", "V4-Flash", "V4-Pro") for p in ("decode", "prefill")]
    ):
        first, because, *rejected = plan.strip().splitlines()
        assert re.match(rf"DeepSeek-{model}, {phase}, 64 query rows, FP8 cache: reference \(\w+\)", first)
        assert re.match(r"    because \w+", because)
        reasons = dict(re.match(r"    not (\w+) +(\S.*)", line).groups() for line in rejected)
        assert set(reasons) == set(BACKENDS) - {"reference"}


@needs_cpu
def test_doctor_plans_for_the_rows_it_is_given(capsys):
    assert "V3.2, decode, 20000 query rows" in run(capsys, "doctor", "--query-tokens", "20000")[1]


def test_doctor_describes_a_gpu_and_says_what_to_install(capsys, monkeypatch):
    pretend_gpu(monkeypatch, "triton")
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert "compute capability 9.0, 132 SMs, 232448 bytes" in out and "because" not in out
    decode, prefill, install = out.splitlines()[:3]
    for line, phase in ((decode, "decode"), (prefill, "prefill")):
        assert line == f"kernels    {phase}: triton, not the fastest: hopper cannot be used: not installed"
    assert install == 'install    pip install "jax-sparse-mla[cuda13]" (or cuda12)'
    pretend_gpu(monkeypatch, "hopper")
    assert run(capsys, "doctor")[1].startswith("kernels    decode: hopper, the fastest here\n")
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")
    for why, said in (("it takes jax 0.11.1", "not hopper, the fastest: it takes jax 0.11.1"), (None, "hopper")):
        monkeypatch.setattr(alone, "unready", lambda phase, framework, why=why: why)
        assert f"torch      prefill: {said}\n" in run(capsys, "doctor")[1]
    no_kernel = {"prefill": {}, "decode": {"hopper": KERNEL_UNUSABLE}}
    monkeypatch.setattr(machine, "missing_for", no_kernel.get)
    assert run(capsys, "doctor")[1].splitlines()[2].startswith("install    nvcc (the CUDA toolkit)")


def test_doctor_names_a_triton_that_our_launchers_do_not_know(capsys, monkeypatch):
    triton = pytest.importorskip("triton")
    assert re.search(r"^triton +\d.*: launched by our own launchers$", run(capsys, "doctor")[1], re.M)
    monkeypatch.setattr(triton, "__version__", "9.0.0")
    assert re.search(r"^triton +\d.*: unknown to our launchers", run(capsys, "doctor")[1], re.M)


@pytest.mark.parametrize("rows, backend", [(8, "triton"), (1024, "flashmla")])
def test_doctor_plans_for_the_columns_of_each_model(capsys, monkeypatch, rows, backend):
    """As the attention functions do: without the columns, little work would not be seen as such."""
    pretend_gpu(monkeypatch, "flashmla", "triton")
    out = run(capsys, "doctor", "--query-tokens", str(rows))[1]
    assert re.findall(rf"decode, {rows} query rows, FP8 cache: (\w+)", out) == [backend] * 3


def test_doctor_plans_only_the_phases_that_a_backend_can_serve_here(capsys, monkeypatch):
    """Without nvcc and without a built binary `hopper` has its prefill alone."""
    pretend_gpu(monkeypatch)
    absent = dict.fromkeys(set(BACKENDS) - {"hopper", "reference"}, "not installed")
    no_kernel = {"prefill": {}, "decode": {"hopper": "its CUDA kernel cannot be used here"}}
    monkeypatch.setattr(machine, "missing_for", lambda phase: absent | no_kernel[phase])
    out = run(capsys, "doctor")[1]
    assert re.findall(r", (\w+), 64 query rows, FP8 cache: (\w+)", out) == 3 * [
        ("decode", "reference"),
        ("prefill", "hopper"),
    ]


def test_doctor_lists_the_engines_that_find_our_plugins(monkeypatch):
    ours = "sparse_mla_torch.plugins.vllm:register"
    plugins = {
        "vllm.general_plugins": EntryPoint("jax_sparse_mla", ours, "vllm.general_plugins"),
        "sglang.srt.plugins": EntryPoint("theirs", "another.package:register", "sglang.srt.plugins"),
    }
    installed = {"vllm": "0.33.2", "sglang": None}
    monkeypatch.setattr(doctor, "entry_points", lambda group: [plugins[group]])
    monkeypatch.setattr(doctor, "version", installed.get)
    assert dict(doctor._engines()) == {
        "vllm": "0.33.2: chosen by --attention-backend JAX_SPARSE_MLA",
        "sglang": "not installed",
    }
    installed |= {"vllm": "0.34.0", "sglang": "0.5.23"}
    engines = dict(doctor._engines())
    assert engines["vllm"].startswith("0.34.0: left alone, made for 0.33.") and "our plugin is not" in engines["sglang"]


def test_the_installed_command():
    script = os.path.join(os.path.dirname(sys.executable), "jax-sparse-mla")
    if not os.path.exists(script):
        pytest.skip("the package is not installed beside this Python")
    done = subprocess.run([script, "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("kernels ")


def test_the_package_and_doctor_never_import_torch():
    code = (
        "import sys; from jax_sparse_mla.cli import main; s = main(['doctor']); sys.exit(s or 'torch' in sys.modules)"
    )
    assert python(code).returncode == 0


# generate: arguments


def test_generate_without_torch_says_what_is_missing():
    code = "import sys; sys.modules['torch'] = None; from jax_sparse_mla.cli import main; sys.exit(main(['generate']))"
    done = python(code)
    assert (
        done.returncode == 2 and "this needs torch and transformers (the extra [hf]): no package torch" in done.stderr
    )
    assert "--no-check goes without them" in done.stderr


def test_a_check_that_is_not_installed_is_said(capsys, monkeypatch):
    monkeypatch.setattr(checks, "entry_points", lambda group: [])
    status, out, err = run(capsys, "generate")
    assert status == 2 and not out and "no entry point jax_sparse_mla.check is installed" in err
    assert "jax-sparse-mla[hf]" in err and "--no-check goes without them" in err


@needs_models
def test_an_older_transformers_is_said(capsys, monkeypatch):
    """Not `KeyError: 'deepseek_sparse_attention'`, from somewhere within."""
    for name in [name for name in sys.modules if name.startswith("sparse_mla_torch.check")]:
        monkeypatch.delitem(sys.modules, name)  # else it is not imported again
    for version in ("4.57.1", "5.22.9", "5.9.0.dev0"):
        monkeypatch.setattr(packages, "version", lambda name, version=version: version)
        status, _, err = run(capsys, "generate")
        assert status == 2 and f"transformers {version} is installed" in err
        assert 'needs 5.23 or newer: pip install "transformers>=5.23"' in err


@needs_models
def test_the_oldest_transformers_is_the_extra_s():
    from sparse_mla_torch.check import OLDEST_TRANSFORMERS

    with open(pathlib.Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["hf"]
    assert "transformers>={}.{}".format(*OLDEST_TRANSFORMERS) in extra


def test_a_command_is_required(capsys):
    for args in ([], ["no_command"]):
        with pytest.raises(SystemExit) as exit_:
            main(args)
        assert exit_.value.code == 2
    assert "generate" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-3", "x", "1.5"])
def test_counts_must_be_positive(capsys, value):
    options = [("doctor", "--query-tokens")]
    if HAS_MODELS:
        names = ("max-new-tokens", "requests", "max-batch", "chunk-size", "speculative-steps")
        options += [("generate", f"--{name}") for name in names]
    for command, option in options:
        with pytest.raises(SystemExit) as exit_:
            main([command, option, value])
        assert exit_.value.code == 2
        assert f"argument {option}" in capsys.readouterr().err


@needs_models
@pytest.mark.parametrize(
    "args",
    [
        ["--preset", "v5"],
        ["--kv-cache", "int8"],
        ["--device", "tpu"],
        ["--backend", "flash"],
        ["--compare-backends", "triton,flash"],
        ["--prefill-backend", "triton"],
        ["--model", "here", "--preset", "v4"],
        ["--prompt", "a", "--prompt-file", "b"],
        ["--seed", "x"],
        ["--seed", "-1"],
        ["--draft-oracle", "1.5"],
        ["--draft-oracle", "-0.1"],
        ["--draft-oracle", "nan"],
        *(["--mesh", mesh] for mesh in ("2", "0x2", "2xa")),
        ["text"],
    ],
)
def test_generate_refuses_bad_arguments(capsys, args):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", *args])
    assert exit_.value.code == 2 and "error: " in capsys.readouterr().err


PROCESS = ["--coordinator", "127.0.0.1:1", "--num-processes", "2"]


@needs_models
def test_nothing_to_generate_from(capsys, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    for args, message in (
        (["--prompt", ""], "the prompt has no tokens"),
        (["--prompt-file", f"{tmp_path}/empty.txt"], "the prompt has no tokens"),
        (["--prompt-file", f"{tmp_path}/none.txt"], "No such file"),
        (["--prompt-file", f"{tmp_path}/latin.txt"], "codec can't decode"),
        (["--model", f"{tmp_path}/none"], f"no checkpoint folder {tmp_path}/none"),
        (["--model", ""], "no checkpoint folder"),
        (["--model", str(tmp_path)], "or 'glm_moe_dsa' or 'deepseek_v41' or 'glm5_next', got 'llama'"),
        (["--draft-oracle", "0.5"], "--draft-oracle needs --speculative-steps"),
        (["--temperature", "-1"], "temperature must be a finite number of at least 0, got -1.0"),
        (["--top-p", "0"], "top_p must be above 0 and at most 1, got 0.0"),
        (["--mesh", "1x1", "--compare-backends", "reference"], "leave out --mesh"),
        (["--mesh", "99x99"], "a mesh of 99x99 takes 9801 devices, JAX has "),
        (["--mesh", "2x1", "--num-processes", "2"], "--coordinator, --num-processes and --process-id go together"),
        ([*PROCESS, "--process-id", "0"], "--coordinator needs --mesh"),
        ([*PROCESS, "--process-id", "2", "--mesh", "2x1"], "--process-id must be below --num-processes 2, got 2"),
    ):
        status, out, err = run(capsys, "generate", *args)
        assert status == 2 and "KV cache" not in out and message in err, (args, err)


# generate: runs of small models. Their shapes are those of hf_models.OPTIONS, so that layers compile once.

ROUTED = "reference" if jax.default_backend() == "cpu" else "(hopper|flashmla|triton)"
SHAPES = ["--requests", "2", "--max-batch", "2", "--chunk-size", "112", "--max-new-tokens", "4"]
SHAPES += ["--prefill-backend", "flashmla_sparse"]  # so small a chunk would attend to the pages


@pytest.fixture
def small_presets(monkeypatch):
    """The presets with small models in their place, and a prompt of 470 bytes."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import hf_models

    monkeypatch.setitem(texts.CONFIGS, "v4", hf_models.as_preset(hf_models.small_v4_config()))
    monkeypatch.setitem(texts.CONFIGS, "v32", hf_models.as_preset(hf_models.small_v32_config()))
    text = texts.default_prompt()[:470]
    monkeypatch.setattr(texts, "default_prompt", lambda: text)


def save_preset(name, seed, folder):
    from sparse_mla_torch.check import Check
    from sparse_mla_torch.eager.model import Eager

    model, eager = Model.from_config(texts.CONFIGS[name]), Eager()
    Check(eager).load_arrays(model, texts.CONFIGS[name], model.random_arrays(seed))
    eager.model.save_pretrained(folder)


def generated(out):
    return re.findall(r"tokens \[(.*)\]", out)


def recorded(monkeypatch, module, name):
    """What calls of this function will have returned."""
    results, function = [], getattr(module, name)

    def call(*args):
        results.append(function(*args))
        return results[-1]

    monkeypatch.setattr(module, name, call)
    return results


def repeat_without_running(monkeypatch, reports):
    """The command serves nothing any more: tokens are 0, and the layers compare as these reports have it."""
    from sparse_mla_torch.check import comparison

    def serve(args, setup, engine, requests, *_):
        for request in requests:
            request.output = [0] * request.max_new_tokens
        return collections.Counter()

    monkeypatch.setattr(generation, "_serve", serve)
    monkeypatch.setattr(comparison, "compare_layers", lambda *_: reports)
    monkeypatch.setattr(comparison, "run_layers", lambda *_: {})
    monkeypatch.setattr(comparison, "count_agreeing_tokens", lambda *_: (0, 0))


@pytest.mark.long
def test_a_saved_preset_generates_the_same(capsys, tmp_path, small_presets, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    args = ["generate", *SHAPES, "--no-check"]
    status, expected, _ = run(capsys, *args, "--preset", "v32", "--seed", "3", "--verbose")
    assert status == 0 and "preset v32, seed 3 (random weights)" in expected
    save_preset("v32", 3, tmp_path)
    status, out, _ = run(capsys, *args, "--model", str(tmp_path), "--verbose")
    assert status == 0 and f"model      {tmp_path}\n" in out
    assert len(generated(out)) == 2 and all(len(line.split(",")) == 4 for line in generated(out))
    assert generated(out) == generated(expected)
    assert "check" not in out


@pytest.mark.long
def test_a_folder_is_served_without_torch(tmp_path, small_presets, capsys):
    """torch and transformers cannot be imported."""
    save_preset("v32", 3, tmp_path)
    # The shapes of the run before, whose programs are in the cache.
    args = ["generate", "--model", str(tmp_path), *SHAPES, "--prompt", texts.default_prompt()]
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
    code += "from jax_sparse_mla.cli import main; sys.exit(main(sys.argv[1:]))"
    done = python(code, *args, "--no-check", "--stream", "--verbose")
    assert done.returncode == 0, done.stderr
    assert "requests   2 with 470, 235 prompt tokens, 4 new tokens each" in done.stdout
    assert len(generated(done.stdout)) == 2


def test_requests_that_fail_are_said(capsys, monkeypatch):
    """Nothing is compared then: their tokens are not those of a request that was served."""

    def serve(self, engine, requests, *_):
        requests[1].error = "the model's logits are not finite"

    monkeypatch.setattr(setup.Setup, "serve", serve)
    status, out, _ = run(capsys, "generate", "--preset", "v32", "--no-check", "--requests", "2", "--chunk-size", "16")
    assert status == 1 and out.endswith("failed     1 of 2 requests: the model's logits are not finite\n")


def test_text_is_streamed_by_whole_characters(capsys):
    from jax_sparse_mla.cli.progress import Stream
    from jax_sparse_mla.serving.request import Request

    request, seen = Request([1], 6), []
    request.on_token = Stream(texts.ByteTokenizer())
    for token in "aé€".encode():
        request.take(token, 0.0)
        request.tell()
        seen.append(capsys.readouterr().out)
    assert seen == ["a", "", "é", "", "", "€\n"]


def test_a_vocabulary_too_small_for_bytes(capsys, tmp_path, small_presets):
    import hf_models

    hf_models.random_model(hf_models.small_v32_config(vocab_size=200), 0).save_pretrained(tmp_path)
    status, out, err = run(capsys, "generate", "--model", str(tmp_path))
    assert status == 2 and "KV cache" not in out and "no tokenizer, and a vocabulary too small for bytes: 200" in err


@needs_models
def test_the_default_output_is_short(capsys, small_presets):
    """No text of an untrained model; what was proved, in some ten lines. Its programs are those of the next test."""
    status, out, _ = run(
        capsys, "generate", "--preset", "v32", "--seed", "1", *SHAPES, "--prefill-backend", "flashmla_kv"
    )
    assert status == 0 and len(out.splitlines()) <= 12
    labels = re.findall(r"^\w+", out, re.M)
    assert " ".join(labels) == "device model KV requests memory prompts speed attention layers tokens check"
    assert re.search(r"^layers +2 of 2 agree with transformers' eager attention: cosine ≥ 0\.999\d+$", out, re.M)
    assert re.search(rf"^attention +prefill by {ROUTED}, decode by {ROUTED}$", out, re.M)
    assert re.search(r"^memory +weights \d\.\d\d GiB, caches \d\.\d\d GiB$", out, re.M)
    assert re.search(r"^speed +8 new tokens in ", out, re.M)


@pytest.mark.parametrize(
    ("preset", "cache", "backend"),
    [
        ("v32", "fp8", "flashmla_kv"),
        pytest.param("v32", "fp8", "flashmla_sparse", marks=pytest.mark.long),
        pytest.param("v4", "fp8", "flashmla_sparse", marks=pytest.mark.long),
    ],
)
def test_status_of_the_check(capsys, small_presets, monkeypatch, preset, cache, backend):
    from sparse_mla_torch.check import comparison

    reports = recorded(monkeypatch, comparison, "compare_layers")
    args = ["generate", "--preset", preset, "--seed", "1", *SHAPES, "--kv-cache", cache]
    args += ["--prefill-backend", backend, "--verbose"]
    status, out, err = run(capsys, *args)
    assert status == 0 and out.endswith("check      passed\n") and "FAILED" not in out
    layers = re.findall(r"^ +\d+  (window.*|top-64) +0\.999\d+ +0\.99\d+ +(-|0\.9\d+|1\.0+) +\(\d+\)$", out, re.M)
    assert len(layers) == (3 if preset == "v4" else 2)
    assert "requests   2 with 470, 235 prompt tokens, 4 new tokens each" in out
    assert re.search(r"^route +decode: \w+, paged_decode", out, re.M)
    phase, kernel = ("prefill", "sparse_prefill") if backend == "flashmla_sparse" else ("decode", "paged_decode")
    assert re.search(rf"^route +prefill: \w+, {kernel}", out, re.M)
    kinds = "window; window + C4 top-16; window + C128" if preset == "v4" else "top-64"
    for step, attended in (("prefill", phase), ("decode", "decode")):
        assert re.search(rf"^ran +{step}: {ROUTED}, {attended} \({re.escape(kinds)}\)$", out, re.M)
    agreeing = int(re.search(r"^tokens +(\d) of 8 are", out, re.M)[1])
    assert agreeing >= 3 and re.search(r"^prefill +\d+ tokens, \d+\.\d+ s$", err, re.M)  # near-ties go either way

    repeat_without_running(monkeypatch, *reports)
    monkeypatch.setitem(comparison.MIN_COSINE, cache, 2.0)
    status, out, _ = run(capsys, *args[:-1])
    assert status == 1 and out.endswith("check      FAILED\n") and out.count("FAILED") == len(layers) + 1


def test_a_model_that_transformers_cannot_load_is_said(capsys, small_presets, monkeypatch):
    """It is loaded beside the first programs, so that the text has been made by then."""
    from sparse_mla_torch.check import Check

    repeat_without_running(monkeypatch, [])

    def load(check, *_):
        raise ValueError("an unknown quantisation")

    monkeypatch.setattr(Check, "load_arrays", load)
    status, out, err = run(capsys, "generate", "--preset", "v32", "--max-new-tokens", "1")
    assert status == 2 and out.endswith("check      not done: transformers' model could not be loaded\n")
    assert err.endswith("jax-sparse-mla generate: an unknown quantisation\n")


@pytest.mark.long
@pytest.mark.cpu
def test_speculative_decoding(capsys, small_presets, monkeypatch):
    """Both decodings, their comparison, and how many drafts were accepted."""
    args = ["generate", "--preset", "v32", "--prompt", texts.default_prompt()[:100], "--requests", "2"]
    args += ["--chunk-size", "112", "--max-new-tokens", "12", "--speculative-steps", "2"]
    status, out, _ = run(capsys, *args, "--draft-oracle", "0.7", "--verbose")
    assert status == 0 and out.count("check      passed") == 2 and "FAILED" not in out
    plain, speculative = generated(out)[:2], generated(out)[2:]
    assert speculative == plain and len(plain[0].split(",")) == 12
    assert re.search(r"^route +verify: \w+, paged_decode", out, re.M) and "probability 0.7" in out
    histogram = re.findall(r"^ +(\d) drafts: +(\d+)", out, re.M)
    assert [int(count) for count, _ in histogram] == [0, 1, 2]
    # Each request's first token comes from its prefill.
    assert sum((int(count) + 1) * int(times) for count, times in histogram) == 2 * 11
    assert re.search(r"^accepted +\d\.\d\d tokens a round, \d+ rounds of a request$", out, re.M)
    assert "tokens     24 of 24 are plain decoding's" in out

    repeat_without_running(monkeypatch, [])
    for margin, expected in ((0.01, 0), (0.5, 1)):
        differences = [Difference(1, 3, margin)]
        monkeypatch.setattr(report, "compare_with_plain", lambda *_, differences=differences: differences)
        status, out, _ = run(capsys, *args)
        assert status == expected and "tokens     23 of 24 are plain decoding's" in out
        assert f"request 1, token 3 differs, under a top-2 margin of {margin:.4f}" in out
        assert f"check      {'FAILED' if expected else 'passed'}: a token may differ" in out


# generate: the device and the backends. The small presets have FlashMLA's dimensions; it pads their heads to 64.


def attended(out):
    """What attends in each kind of step, by the lines `ran`: {"decode": {"flashmla, decode"}}."""
    calls = {}
    for step, call in re.findall(r"^ran +(\w+): (\w+, \w+) \(", out, re.M):
        calls.setdefault(step, set()).add(call)
    return calls


def planned(out):
    """The same as the lines `route` have it, by phase."""
    return {phase: {f"{backend}, {phase}"} for phase, backend in re.findall(r"^route +(\w+): (\w+), ", out, re.M)}


KERNELS = {
    "flashmla": {"flash_fwd_splitkv_mla_fp8_sparse_kernel", "sparse_attn_fwd_kernel"},
    "triton": {"sparse_mla_kernel"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("preset", ["v4", "v32"])
def test_the_lines_ran_are_true(capsys, small_presets, preset, backend):
    """The kernels that the GPU ran, as its profiler saw them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        status, out, _ = run(
            capsys, "generate", "--preset", preset, *SHAPES, "--backend", backend, "--no-check", "--verbose"
        )
    assert status == 0
    assert attended(out) == {"prefill": {f"{backend}, prefill"}, "decode": {f"{backend}, decode"}}
    names = {event.name() for event in profiler.profiler.kineto_results.events()}
    for other, kernels in KERNELS.items():
        for kernel in kernels:
            assert any(kernel in name for name in names) == (other == backend), (kernel, sorted(names))


@needs_models
def test_a_backend_that_cannot_serve(capsys, small_presets):
    """Nothing is served, by none."""
    for option, backend in (("--backend", "flashinfer"), ("--compare-backends", "reference,flashinfer")):
        status, out, err = run(capsys, "generate", "--preset", "v32", *SHAPES, option, backend)
        assert status == 2 and "KV cache" not in out and "backend 'flashinfer' cannot serve this prefill call" in err


@pytest.mark.cpu
def test_a_device_that_is_not_there(capsys):
    status, out, err = run(capsys, "generate", "--no-check", "--device", "cuda")
    assert status == 2 and out == "" and f"--device cuda: JAX {jax.__version__} has no GPU here" in err


@pytest.mark.long
@pytest.mark.cpu
@needs_models
def test_the_comparison_of_backends_can_fail(capsys, small_presets, monkeypatch):
    from jax_sparse_mla.serving import comparison

    def other_logits(engine, backend, requests, serve=comparison.replay_logits):
        logits = serve(engine, backend, requests)
        return logits * 0.9 if backend else logits

    monkeypatch.setattr(comparison, "replay_logits", other_logits)
    args = ["generate", "--preset", "v32", *SHAPES, "--no-check", "--compare-backends", "reference"]
    status, out, _ = run(capsys, *args)
    assert status == 1 and out.endswith("backends   DISAGREE\n")
    assert re.search(r"^ +reference +0\.(0999|1000)\d +8 of 8 tokens  FAILED$", out, re.M)


# generate: the real presets

ON_A_GPU = ["--chunk-size", "2048", "--requests", "2", "--max-new-tokens", "8", "--verbose"]


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["v4", "v32"])
def test_backends_agree(capsys, preset):
    """FP8 caches; what the router picks, FlashMLA, and the Triton kernels."""
    args = ["--preset", preset, *ON_A_GPU, "--no-check", "--compare-backends", "flashmla,triton"]
    status, out, _ = run(capsys, "generate", *args)
    assert status == 0 and out.endswith("backends   agree\n")
    assert attended(out) == planned(out)
    reports = re.findall(r"^ +(\w+) +(0\.\d+) +(\d+) of 16 tokens$", out, re.M)
    assert [name for name, *_ in reports] == ["flashmla", "triton"]
    assert max(float(difference) for _, difference, _ in reports) > 0  # they are other kernels


@pytest.mark.gpu
def test_speculative_decoding_on_a_gpu(capsys):
    status, out, _ = run(capsys, "generate", *ON_A_GPU, "--speculative-steps", "3", "--draft-oracle", "0.7")
    assert status == 0 and out.count("check      passed") == 2
    assert attended(out)["verify"] == planned(out)["decode"] and re.search(r"tokens +1[56] of 16 are plain", out)


def test_default_prompt_is_long_enough_for_every_selection():
    prompt = texts.ByteTokenizer().encode(texts.default_prompt())
    assert len(prompt) // 4 > 512 and len(prompt) > 2048 and len(prompt) // 128 >= 20
    assert texts.ByteTokenizer().decode(prompt) == texts.default_prompt()
