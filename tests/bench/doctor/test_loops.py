from dlrm_bench.bench.doctor.loops import lines_of_loop

SOURCE = """for batch in data:
    for row in batch:
        x = row
        y = [
            x]
    step()
while True:
    z = 1
"""


def test_the_innermost_loop_that_is_not_the_training_loop(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    file = str(script)
    assert lines_of_loop(file, 3, [(file, 6)]) == range(2, 6)
    assert lines_of_loop(file, 2, [(file, 6)]) == range(2, 6)
    assert lines_of_loop(file, 6, [(file, 6)]) == range(6, 7)  # the training loop is none
    assert lines_of_loop(file, 6, []) == range(1, 7)
    assert lines_of_loop(file, 8, [(file, 6)]) == range(7, 9)


def test_a_source_that_cannot_be_read_has_no_loops(tmp_path):
    (tmp_path / "broken.py").write_text("for x in")
    for name in ("none.py", "broken.py"):
        assert lines_of_loop(str(tmp_path / name), 3, []) == range(3, 4)
