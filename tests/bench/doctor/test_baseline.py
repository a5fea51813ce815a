import json
from pathlib import Path

import pytest

from dlrm_bench.bench.doctor import judge
from dlrm_bench.bench.doctor.baseline import compare
from dlrm_bench.bench.doctor.diagnosis import (
    SCHEMA,
    Diagnosis,
    Overhead,
    RankSummary,
    read_diagnosis,
    write_diagnosis,
)
from dlrm_bench.bench.doctor.findings import Finding
from dlrm_bench.bench.doctor.parts import Parts
from dlrm_bench.bench.doctor.remedies import REMEDIES, WHOLE_ITERATION, predict
from dlrm_bench.bench.doctor.text import comparison_lines, finding_lines, prediction_lines
from tests.bench.doctor.made import frame
from tests.bench.records.full_disk import fails_after


def finding(
    kind: str = judge.SYNC, *, line: int = 9, ms: float | None = 0.5, library: str = "", file: str = "train.py"
) -> Finding:
    return Finding(
        kind=kind,
        file=file,
        line=line,
        function="main",
        text="loss.item()",
        library=frame(library, 5, "g") if library else None,
        called_from=None,
        count=1.0,
        ms=ms,
        low_ms=None,
        high_ms=None,
        calls_ms=ms,
        detail="",
        reads=[],
        worst_ms=ms,
        waits=1.0,
        copies={},
        suggestion="leave it out",
    )


NOTHING = Parts(dense_ms=0.0, input_dist_ms=0.0, record_streams_ms=0.0, stages_ms=0.0, gpu_ms=0.0)


def rank(graph_launches: float) -> RankSummary:
    return RankSummary(
        rank=0,
        ms=2.0,
        median_ms=2.0,
        cpu_ms=2.0,
        thread_ms=2.0,
        threads_ms={},
        calls={"graph_launch": graph_launches},
        gil_wait_ms=None,
        gpu_computing_ms=None,
        gpu_idle_fraction=None,
        collective_wait_ms=None,
        collective_transfer_ms=None,
        late_ms=None,
    )


def diagnosis(
    ms: float, *findings: Finding, device: str = "cuda", graphs: float = 0.0, parts: Parts = NOTHING
) -> Diagnosis:
    return Diagnosis(
        schema=SCHEMA,
        created="2026-11-22T00:00:00+00:00",
        command=["train.py"],
        device=device,
        gpu=None,
        versions={},
        world_size=1,
        found_by="progress",
        iterations=50,
        iteration_ms=ms,
        overhead=Overhead(
            plain_ms=ms,
            hook_us=1.0,
            sampled_ms=ms,
            sample_us=10.0,
            period_us=1000.0,
            samples=100,
            traced_ms=ms,
            marked_ms=ms,
        ),
        ranks=[rank(graphs)],
        parts=parts,
        findings=list(findings),
        lines=[],
        periodic=[],
        status=0,
        predictions=[],
        notes=[],
    )


def test_lines_that_moved_are_the_same():
    result = compare(diagnosis(2.0, finding(line=9)), diagnosis(2.0, finding(line=30)))
    assert (result.new, result.gone) == ([], [])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["src/train.py"], ["train.py"]),
        (["train.py"], ["/home/me/src/train.py"]),
        (["a/net.py", "b/net.py"], ["/home/me/a/net.py", "net.py"]),
        (["net.py", "/home/me/a/net.py"], ["a/net.py", "b/net.py"]),
    ],
)
def test_the_working_directory_makes_no_finding_new(before, after):
    was, now = ([finding(file=file) for file in files] for files in (before, after))
    result = compare(diagnosis(2.0, *was), diagnosis(2.0, *now))
    assert (result.new, result.gone) == ([], [])


def test_a_file_of_another_name_is_another_one():
    was, now = [finding(file="a/net.py")], [finding(file="a/net.py"), finding(file="net.py"), finding(file="my_net.py")]
    result = compare(diagnosis(2.0, *was), diagnosis(2.0, *now))
    assert sorted(str(change.finding["file"]) for change in result.new) == ["my_net.py", "net.py"]


def test_a_second_sync_in_a_function_is_new():
    result = compare(diagnosis(2.0, finding()), diagnosis(2.5, finding(), finding(line=12)))
    (change,) = result.new_syncs()
    assert (change.count, change.ms) == (1, 0.5)


def test_only_what_makes_the_host_wait_is_a_new_sync():
    result = compare(diagnosis(2.0), diagnosis(2.0, finding(judge.BURST), finding(judge.SHAPE, ms=None)))
    assert len(result.new) == 2
    assert result.new_syncs() == []


def test_a_sync_that_only_moved_is_seen():
    before = diagnosis(2.0, finding(), finding(judge.PRINT, ms=0.1))
    after = diagnosis(1.95, finding(judge.PRINT, ms=0.55))
    result = compare(before, after)
    assert [change.finding["kind"] for change in result.gone] == [judge.SYNC]
    assert result.predicted_ms == pytest.approx(1.5)
    assert result.moved_ms == pytest.approx(0.45)
    text = "\n".join(comparison_lines(result))
    assert "1.500 was predicted, 1.950 came" in text
    assert "+0.450" in text


def test_graphs_take_the_dense_networks_part_away():
    """Its loop of launches is within the part, and counts once."""
    parts = Parts(dense_ms=1.2, input_dist_ms=0.3, record_streams_ms=0.0, stages_ms=0.0, gpu_ms=0.9)
    before = diagnosis(2.5, finding(judge.OPTIMIZER_LOOP, ms=0.4), finding(ms=0.1), parts=parts)
    result = compare(before, diagnosis(1.3, graphs=3.0))
    assert result.gone_ms == pytest.approx(1.3)
    assert result.predicted_ms == pytest.approx(1.2)
    assert "+8 % from the prediction" in "\n".join(comparison_lines(result))
    assert compare(before, diagnosis(1.3)).gone_ms == pytest.approx(0.5)


def test_an_input_dist_without_its_reads_is_gone_as_a_whole():
    parts = Parts(dense_ms=1.2, input_dist_ms=0.8, record_streams_ms=0.0, stages_ms=0.0, gpu_ms=0.5)
    read = finding(ms=0.1, library="torchrec/distributed/dist_data.py")
    other = finding(judge.FROM_LIST, ms=0.2, library="torchrec/distributed/dist_data.py")
    result = compare(diagnosis(2.5, read, other, parts=parts), diagnosis(1.8))
    assert (result.gone_parts, result.gone_ms) == (["host time of the input dist"], 0.8)
    left = compare(diagnosis(2.5, read, other, parts=parts), diagnosis(2.4, other))
    assert (left.gone_parts, left.gone_ms) == ([], pytest.approx(0.1))
    pinned = finding(judge.SYNCHRONIZE, ms=0.1, library="pipeline/five_stage/splits_exchange.py")
    exchanged = compare(diagnosis(2.5, read, other, parts=parts), diagnosis(2.4, pinned))
    assert (exchanged.gone_parts, exchanged.gone_ms) == ([], pytest.approx(0.3))


def test_a_baseline_of_another_device_is_refused():
    with pytest.raises(ValueError, match="--baseline was made on cpu"):
        compare(diagnosis(2.0, device="cpu"), diagnosis(2.0))


def test_a_written_diagnosis_reads_the_same(tmp_path):
    path = tmp_path / "new" / "d.json"
    write_diagnosis(diagnosis(2.0, finding()), path)
    assert read_diagnosis(path) == diagnosis(2.0, finding())


def test_a_disk_that_is_full_leaves_the_diagnosis_before(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    write_diagnosis(diagnosis(2.0), path)
    with fails_after(100):
        write_diagnosis(diagnosis(3.0), path)
    assert read_diagnosis(path) == diagnosis(2.0)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["[]", json.dumps({"schema": 7, "findings": []}), "{", json.dumps({"schema": 1})])
def test_what_is_no_diagnosis_is_refused(tmp_path: Path, content):
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"d\.json"):
        read_diagnosis(path)


def test_predictions_stop_at_what_the_gpu_has_to_do():
    torchrec = finding(ms=3.0, library="torchrec/distributed/dist_data.py")
    parts = NOTHING | {"gpu_ms": 2.5}
    found = [torchrec, finding(ms=1.0)]
    predictions = {p["remedy"].partition(":")[2]: p for p in predict(found, 5.0, parts, graphs=False, pipelined=False)}
    trimmed = predictions[" trimmed input dist (TrimmedEBCSharder)"]
    assert (trimmed["findings"], trimmed["removes_ms"], trimmed["at_best_ms"]) == ([1], 3.0, 2.5)
    (own,) = (p for p in predictions.values() if p["remedy"].startswith("the script's own"))
    assert (own["findings"], own["at_best_ms"]) == ([2], 4.0)


def test_a_prediction_is_as_sure_as_its_findings():
    unsure, known = finding(ms=1.0) | {"low_ms": 0.7, "high_ms": 1.4}, finding(judge.PRINT, ms=0.5)
    (prediction,) = predict([unsure, known], 5.0, NOTHING, graphs=False, pipelined=False)  # type: ignore[list-item]
    ends = prediction["removes_low_ms"], prediction["removes_ms"], prediction["removes_high_ms"]
    assert ends == (pytest.approx(1.2), pytest.approx(1.5), pytest.approx(1.9))


def test_a_part_is_taken_away_once():
    loop, read = finding(judge.OPTIMIZER_LOOP, ms=0.5), finding(ms=1.0, library="torchrec/distributed/dist_data.py")
    parts = Parts(dense_ms=2.0, input_dist_ms=1.5, record_streams_ms=0.001, stages_ms=0.0, gpu_ms=0.0)
    made = predict([loop, read], 5.0, parts, graphs=False, pipelined=True)
    predictions = {p["remedy"].removeprefix("five-stage pipeline: "): p for p in made}
    assert predictions["cuda_graph='dense'"]["removes_ms"] == 2.0
    together = predictions["trimmed input dist and cuda_graph='dense' together"]
    assert (together["findings"], together["removes_ms"], together["at_best_ms"]) == ([1, 2], 3.5, 1.5)
    assert predictions["launch_threads=2"]["parts"] == ["host time of the input dist"]
    assert "avoid_record_streams" not in predictions


def test_a_graph_of_the_iteration_takes_all_stages_away_once_nothing_keeps_it_out():
    parts = Parts(dense_ms=2.0, input_dist_ms=1.5, record_streams_ms=0.0, stages_ms=4.5, gpu_ms=0.3)
    found = [finding(judge.SHAPE, ms=0.0), finding(judge.OPTIMIZER_LOOP, ms=0.5)]
    made = predict(found, 5.0, parts, graphs=True, pipelined=True, keeps_out=["tables has sequences"])
    (whole,) = (p for p in made if p["remedy"] == WHOLE_ITERATION)
    assert (whole["removes_ms"], whole["at_best_ms"]) == (4.5, 0.5)
    assert whole["keeps_out"][0] == "tables has sequences"
    assert "shapes change" in whole["keeps_out"][1]
    lines = "\n".join(prediction_lines(diagnosis(5.0, parts=parts) | {"predictions": made}))  # type: ignore[arg-type]
    assert "first: tables has sequences" in lines
    assert all(not p["keeps_out"] for p in made if p is not whole)


def test_what_a_script_has_already_is_not_predicted():
    parts = Parts(dense_ms=0.5, input_dist_ms=0.2, record_streams_ms=0.0, stages_ms=0.0, gpu_ms=0.0)
    (left,) = predict([], 2.0, parts, graphs=True, pipelined=True)
    assert "launch_threads=2" in left["remedy"]
    reads = finding(judge.SYNCHRONIZE, ms=0.1, library="pipeline/five_stage/splits_exchange.py")
    trimmed, _ = predict([reads], 2.0, parts, graphs=True, pipelined=True)
    assert ("trimmed" in trimmed["remedy"], trimmed["removes_ms"]) == (True, 0.2)


def test_a_script_without_torchrec_is_not_offered_its_pipelines():
    found = [finding(judge.OPTIMIZER_LOOP, ms=0.5), finding(judge.H2D, ms=0.1)]
    alone = [p["remedy"] for p in predict(found, 5.0, NOTHING, graphs=False, pipelined=False)]
    assert [name.partition(",")[0] for name in alone] == [
        "the script's own lines changed as suggested",
        "batches in pinned memory",
    ]
    piped = [p["remedy"] for p in predict(found, 5.0, NOTHING, graphs=False, pipelined=True)]
    assert [name for name in piped if name not in alone] == ["five-stage pipeline: cuda_graph='dense'"]


def test_a_trimmed_input_dist_is_doubted_where_shapes_change():
    torchrec = finding(library="torchrec/distributed/dist_data.py")
    predictions = predict([torchrec, finding(judge.SHAPE, ms=None)], 5.0, NOTHING, graphs=False, pipelined=True)
    assert any("shapes change in this script" in p["caution"] for p in predictions)


def test_a_findings_text_has_both_lines_and_what_to_do():
    found = finding(library="torchrec/a.py")
    found["copies"] = {"DtoH pageable": 1.0}
    assert finding_lines(3, found) == [
        "3. sync: 0.500 ms an iteration, 1 call(s) (1 wait(s), 1 DtoH pageable)",
        "   train.py:9 in main: loss.item()",
        "   in torchrec/a.py:5 in g",
        "   do: leave it out",
    ]


def test_the_remedy_names_the_optimizers_whose_step_is_replayed():
    (remedy,) = (remedy for remedy in REMEDIES if remedy.name.endswith(": cuda_graph='dense'"))
    assert all(name in remedy.caution for name in ("Adam,", "AdamW", "SGD", "Adagrad", "`capturable`"))
