"""`jitmx explain --cost`, `--model`, `--measured`, `--parameters`, and `jitmx report`."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jitmx import settings
from jitmx.costs import cards, measured

STEP = ("explain", "--model", "gpt-oss-120b", "--arch", "sm_121")


def test_a_call_s_cost_is_printed_behind_what_it_takes_and_is_its_json(run, read) -> None:
    words = ("explain", "linear", "-m", "1", "-n", "5120", "-k", "2880", "--arch", "sm_121")
    plain, priced = run(*words).stdout, run(*words, "--cost").stdout
    assert priced.startswith(plain)
    said = read(*words, "--cost")
    assert said["us"] == sum(one["us"] * one["times"] for one in said["cost"]) > 0
    assert "cost" not in read(*words)
    (one,) = said["cost"]
    assert one["kernel"] == said["kernel"] and one["bound"] == "memory" and one["instructions"] > 1e6
    assert one["bytes"] == pytest.approx(320 * 45 * 544 + 2 * (5120 + 2880), abs=2 * 5120)
    assert f"{one['us']:.2f}" in priced and "predicted for NVIDIA GB10" in priced


def test_several_numbers_of_rows_are_a_line_each_with_what_they_take_at_the_least(run, read) -> None:
    words = ("explain", "moe", "-m", "16,256,2048", "--arch", "sm_121", "--cost")
    said, lines = read(*words)["calls"], run(*words).stdout.splitlines()
    assert [one["m"] for one in said] == [16, 256, 2048] and len(lines) == 5
    for one, line in zip(said, lines[1:], strict=False):
        assert one["us"] == pytest.approx(sum(each["us"] * each["times"] for each in one["cost"]), rel=1e-3)
        assert f"{one['floor_us']:.1f}" in line
        assert one["us"] <= 1.05 * one["floor_us"]
    # All 128 experts, at 240 GB/s, with x, h and what comes of it.
    moved = 128 * (360 + 180) * 45 * 544 + 2048 * 4 * 2880 * 2 * 3
    assert said[-1]["floor_us"] == pytest.approx(moved / 240e3, rel=0.05)
    run("explain", "moe", "-m", "16,256", "--arch", "sm_121", code=2)


def test_launches_beside_a_product_are_priced_for_its_rows(read) -> None:
    words = ("explain", "linear", "-n", "5120", "-k", "2880", "-m", "8192", "--arch", "sm_90", "--cost")
    rows = read(*words, "activation=fp8")["cost"][1]
    norm = read(*words, "norm=1")["cost"][1]
    assert rows["kernel"].startswith("norm.rows") and norm["kernel"].startswith("norm.rms")
    assert rows["bytes"] == pytest.approx(8192 * 2880 * 3, rel=0.01)  # bf16 in, E4M3 out
    assert norm["bytes"] == pytest.approx(8192 * 2880 * 4, rel=0.01)


def test_a_call_with_a_launch_of_unknown_cost_has_no_predicted_time(run, read) -> None:
    words = ("explain", "quantize", "--arch", "sm_90", "--cost")
    assert "not predicted for NVIDIA H200: no cost is declared of 1 of the 1 launches" in run(*words).stdout
    assert read(*words)["us"] is None


def test_a_step_is_the_sum_of_its_launches_and_grows_with_batch_and_context(read) -> None:
    short, long, many = (
        read(*STEP, "--batch", str(b), "--context", str(c)) for b, c in ((1, 512), (1, 65536), (16, 512))
    )
    for step in (short, long, many):
        assert step["us"] == pytest.approx(sum(one["us"] * one["times"] for one in step["launches"]), rel=1e-3)
        assert step["tokens_per_second"] == pytest.approx(step["batch"] / step["us"] * 1e6, rel=1e-3)
    # 18 layers read 2 KiB a token and 8 KV heads of 64 values, at 240 GB/s.
    assert long["us"] - short["us"] == pytest.approx((65536 - 512) * 2048 * 18 / 240e3, rel=0.05)
    assert many["us"] > short["us"]
    half = read(*STEP, "--context", "65536", "--kv-cache-dtype", "fp8")
    assert read(*STEP, "--context", "65536", "--kv-cache-dtype", "fp8_e4m3") == half
    assert half["us"] - short["us"] == pytest.approx((long["us"] - short["us"]) / 2, rel=0.1)


def test_a_step_s_inputs_are_rounded_as_the_environment_says_for_vllm(read, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_MOE_ACTIVATION", "fp8")
    monkeypatch.setenv("JITMX_LINEAR_ACTIVATION", "fp8")
    few, many = (
        {one["kernel"].split("-")[0] for one in read(*STEP[:2], "gpt-oss-20b", *STEP[3:], "--batch", batch)["launches"]}
        for batch in ("16", "512")
    )
    assert "moe.decode.columns4" in few and not any("scaled" in name for name in few)
    assert {name.rsplit(".", 1)[0] for name in many} >= {"moe.scaled", "linear.scaled"}


def test_inputs_of_a_draft_s_verification_are_rounded_as_those_of_a_step(read, monkeypatch) -> None:
    asked = ("explain", "--arch", "sm_90", "--model", "gpt-oss-120b", "--batch", "1024", "--context", "2048")
    drafted = (*asked, "--draft", "gpt-oss-120b-eagle3", "--rates", ".7")
    plain = read(*drafted)["verify_us"]["1"]
    monkeypatch.setenv("JITMX_MOE_ACTIVATION", "fp8")
    assert (
        read(*drafted)["verify_us"]["1"] == pytest.approx(read(*asked)["us"], abs=0.1)
        and plain > 1.03 * read(*asked)["us"]
    )


def test_the_table_of_a_step_has_a_line_a_launch_and_names_the_card(run, read) -> None:
    said, step = run(*STEP, "--batch", "4").stdout.splitlines(), read(*STEP, "--batch", "4")
    assert said[0] == "gpt-oss-120b on NVIDIA GB10 (sm_121a), a step of batch 4 behind 2048 tokens a request:"
    assert said[1].split()[:2] == ["LAYER", "KERNEL"] and len(said) == 3 + len(step["launches"])
    found = re.match(r"predicted: (\d+\.\d{3}) ms a step", said[-1])
    assert found is not None and float(found[1]) == pytest.approx(step["us"] / 1e3, abs=0.001)


def test_measured_figures_stand_beside_what_the_model_says(run, read) -> None:
    said = read("explain", "--measured", "--arch", "sm_90")
    assert len(said["figures"]) == len(measured.load().figures)
    assert all(one["predicted_us"] is None or one["predicted_us"] > 0 for one in said["figures"])
    lines = run("explain", "--measured", "--arch", "sm_90").stdout.splitlines()
    assert any(line.startswith("held out: ") and "within 15 %" in line for line in lines)


def test_a_step_says_which_inputs_stay_in_bf16_though_eight_bits_are_asked_for(run, read, monkeypatch) -> None:
    monkeypatch.setenv("JITMX_MOE_ACTIVATION", "fp8")
    monkeypatch.setenv("JITMX_LINEAR_ACTIVATION", "fp8")
    words = ("explain", "--model", "gpt-oss-120b", "--arch", "sm_121", "--batch")
    experts = "inputs of experts are in bf16: JITMX_MOE_ACTIVATION=fp8 is for 64 rows an expert and more on sm_121a"
    dense = "inputs of dense layers are in bf16: JITMX_LINEAR_ACTIVATION=fp8 is for 256 tokens and more"
    settings.reload()
    assert run(*words, "16").stdout.splitlines()[-2:] == [experts, dense]
    assert [read(*words, count)["notes"] for count in ("16", "512", "4096")] == [[experts, dense], [experts], []]


def test_parameters_are_printed_with_their_sources(run, read) -> None:
    said = read("explain", "--parameters", "--arch", "sm_121")["parameters"]
    assert said.keys() == cards.GB10.parameters.keys()
    told = run("explain", "--parameters", "--arch", "sm_121").stdout
    assert all(one["source"] in told for one in said.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "--arch", "sm_90"), "give one of OP, --model, --measured and --parameters"),
        (("explain", "moe", "--measured", "--arch", "sm_90"), "give one of"),
        (("explain", "moe", "--batch", "4", "--arch", "sm_90"), "--batch is of a step"),
        (("explain", "moe", "--kv-cache-dtype", "fp8", "--arch", "sm_90"), "--kv-cache-dtype is of a step"),
        (("explain", "norm", "--rows", "4", "--arch", "sm_90"), "--rows is of the cost of a call: name OP and pass"),
        (("explain", "--measured", "--sms", "4", "--arch", "sm_90"), "--sms is of a call: name OP, or leave --sms out"),
        (("explain", "--parameters", "--cost", "--arch", "sm_90"), "--cost is of a call: name OP"),
        (("explain", "moe", "--cost", "--arch", "sm_80"), "no parameters for sm_80"),
        (("explain", "--measured", "--arch", "sm_121"), "no measured times of sm_121a"),
        (("explain", "--model", "nothing", "--arch", "sm_90"), "nothing' is none of gpt-oss-120b"),
        (("explain", "--model", "gpt-oss-20b", "--arch", "sm_90,sm_121"), "one target at a time"),
        (("explain", "--model", "gpt-oss-20b", "--batch", "0", "--arch", "sm_90"), "'0' is no whole number"),
        (("report", "--arch", "sm_90"), "pass -o FILE"),
        (("report", "--arch", "sm_90", "--family", "nothing", "-o", "r.html"), "nothing"),
    ],
)
def test_what_cannot_be_priced_or_written_is_refused_with_what_to_do(words, said, run) -> None:
    assert said in run(*words, code=2).output


def test_a_page_that_cannot_be_written_is_an_error_in_a_line(run, tmp_path) -> None:
    told = run("report", "--arch", "sm_90", "-o", str(tmp_path / "missing" / "r.html"), code=2).output
    assert "cannot be written: No such file or directory" in told and "Traceback" not in told


def test_a_page_goes_through_links_and_into_pipes_and_leaves_them_what_they_are(run, tmp_path) -> None:
    def written(name: str) -> str:
        return run("report", "--arch", "sm_90", "--family", "bandwidth", "-o", str(tmp_path / name)).stdout

    (tmp_path / "link").symlink_to("page.html")
    written("link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "page.html").read_text().startswith("<!")
    os.mkfifo(tmp_path / "fifo")
    with ThreadPoolExecutor(1) as pool:
        page = pool.submit((tmp_path / "fifo").read_text)
        written("fifo")
        assert page.result(60).startswith("<!")
    assert (tmp_path / "fifo").is_fifo()


def test_a_device_that_is_full_is_an_error_of_the_run_and_none_of_usage_and_stays_a_device(run) -> None:
    full = Path("/dev/full")
    about = ("--arch", "sm_90", "--family", "bandwidth", "-o", str(full))
    for words in (("report", *about), ("bundle", "create", "-q", *about)):
        said = run(*words, code=1).stderr
        assert f"{full} cannot be written: No space left on device; free some space there" in said
        assert "Usage:" not in said
    assert full.is_char_device()


def test_a_dash_is_standard_output_for_a_page_and_refused_where_it_would_be_a_file(
    run, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    about = ("--arch", "sm_90", "--family", "bandwidth")
    done = run("report", *about, "-o", "-")
    assert done.stdout.startswith("<!") and done.stdout.rstrip().endswith("</html>")
    assert "standard output: " in done.stderr
    assert "-o - and --json both ask" in run("report", *about, "-o", "-", "--json", code=2).stderr
    assert "- stands for no stream here" in run("verify", *about, "--ledger", "-", code=2).stderr
    assert list(tmp_path.glob("-")) == []


def test_a_report_s_json_has_what_its_page_has(run, tmp_path) -> None:
    path = tmp_path / "r.html"
    said = json.loads(run("report", "--arch", "sm_90", "--family", "linear", "-o", str(path), "--json").stdout)
    text = path.read_text()
    # Rows of products in E4M3 are made by a launch of norm.
    assert {row["family"] for row in said["variants"]} == {"linear", "norm"} and said["times"]
    assert all(row["name"] in text for row in said["variants"])
    assert {row["kernel"] for row in said["times"]} <= {row["name"] for row in said["variants"]}
    assert any(row["measured"] for row in said["times"])
    assert {setting["name"] for setting in said["settings"]} >= {"JITMX_CACHE_DIR", "JITMX_MODE"}
    assert {check["name"] for check in said["checks"]} and said["cache"]["entries"]["count"] == 0


def test_a_damaged_entry_of_the_cache_is_a_finding_of_the_page(run, tmp_path) -> None:
    run("warmup", "--arch", "sm_90", "--variant", "quantize.quantize")
    objects = list(Path(tmp_path / "cache").rglob("*.cubin"))
    objects[0].write_bytes(b"damaged")
    said = json.loads(
        run("report", "--arch", "sm_90", "--family", "quantize", "-o", str(tmp_path / "r.html"), "--json").stdout
    )
    assert "corrupt-object" in [item["kind"] for item in said["cache"]["findings"]]
    assert str(objects[0]) in (tmp_path / "r.html").read_text()
