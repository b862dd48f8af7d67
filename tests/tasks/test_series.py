import gzip

import numpy as np
import pytest

import isthmus
from isthmus.core.recipe import RecipeError
from isthmus.tasks.build import make_task
from isthmus.tasks.series import PACKAGED, load_series
from isthmus.tasks.sources import DataError


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_series(name):
    series = load_series(name)
    assert np.isfinite(series.values).all()
    assert len(series.values) > 15_000
    part = series.values[: series.edges[0]]
    np.testing.assert_allclose(part.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(part.std(0), 1, atol=1e-9)
    # a season later it looks alike: rows are in order, columns are not mixed
    lagged = [np.corrcoef(part[: -series.season, c], part[series.season :, c])[0, 1] for c in range(part.shape[1])]
    assert max(lagged) > 0.5
    sizes = [len(series.part(p, 96)) for p in ("train", "validation", "test")]
    assert sum(sizes) == len(series.values) + 2 * 96


def table(path, rows, head="a,b"):
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        file.write("\n".join([*([head] if head else []), *(",".join(map(str, r)) for r in rows)]))
    return str(path)


def test_own_files(tmp_path):
    rows = [[i, np.sin(i)] for i in range(100)]
    series = load_series(table(tmp_path / "own.csv.gz", rows))
    assert series.channels == ["a", "b"]
    assert series.edges == (70, 80)
    assert load_series(table(tmp_path / "plain.txt", rows, None)).channels == ["0", "1"]
    rows[5][0] = "?"
    rows[0][1] = ""
    series = load_series(table(tmp_path / "gaps.csv", rows))
    assert "2 missing values" in series.notes[0]
    assert series.values[5, 0] == series.values[4, 0]
    flat = load_series(table(tmp_path / "flat.csv", [[1, i] for i in range(50)]))
    assert flat.channels == ["b"]
    assert "do not move" in flat.notes[0]
    for bad, message in [
        ([["x", "y"]] * 9, "no column of numbers"),
        ([[1, 1]] * 9, "nothing in it moves"),
        ([[1, 2], [3]], "different length"),
    ]:
        with pytest.raises(DataError, match=message):
            load_series(table(tmp_path / "bad.csv", bad))
    with pytest.raises(DataError, match="nor one of electricity"):
        load_series("nowhere.csv")


def recipe(**changes):
    small = {"data.limit": 40, "task": {"kind": "forecast", "lookback": 48, "horizon": 24, "banks": [[3, 24, 12]]}, "rounds": 2}
    return isthmus.recipe("forecast").updated(small | changes)


def test_a_house_forecasts_together(tmp_path):
    task = make_task(recipe())
    assert task.clients == 20
    assert task.client_names[0] == "appliances: T1"
    result = isthmus.run(recipe(**{"evaluate.references": False}), tmp_path / "run")
    assert result.document["loss_global"] < 5
    assert 0 < result.document["accuracy_global"] < 1


def test_accuracy_is_against_the_season_before():
    task = make_task(recipe())
    rows = task.test[3]
    future, naive = task.y[rows].chunk(2, 1)
    perfect, equal = task.measure(future, task.y[rows]), task.measure(naive, task.y[rows])
    assert perfect[0].max() == 0
    assert perfect[1].mean() > 0.9  # but where the naive forecast is right as well
    assert equal[1].max() == 0


@pytest.mark.parametrize(
    ("task", "message"),
    [({"lookback": 0}, "task.lookback = 0"), ({"horizon": 10**6}, "longer than the train part"), ({"banks": [[3, 99, 1]]}, "task.banks"), ({"banks": 3}, "task.banks"), ({"deep": 1}, "task.deep: no such field")],
)  # fmt: skip
def test_bad_fields(task, message):
    with pytest.raises(RecipeError, match=message):
        make_task(recipe(task={"kind": "forecast", "lookback": 48, "horizon": 24, "banks": [[3, 24, 12]]} | task))
