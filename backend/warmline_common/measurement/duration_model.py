"""Model of how long work takes by its size, fitted to measured durations.  Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median_low

from warmline_common.measurement.recent_durations import WorkDuration

COUNT_TRUSTED = 3  # durations of a class, from which on it weighs fully: one alone may be an outlier
ASSUMED_WEIGHT = 0.02  # of the assumed shape, against a class that is trusted: it decides where nothing is measured
ITERATIONS = 6
ERROR_MIN = 0.05  # a relative one; smaller ones weigh as much
SECONDS_MIN = 1e-6  # a coarse clock may show 0
PIVOT_MIN = 1e-12  # a smaller one is that of a singular matrix, whose diagonal is 1

Matrix = list[list[float]]


@dataclass(frozen=True)
class DurationModel:
    """Seconds of work: a fixed part, a part by its amount, and one by its amount and context (attention)."""

    fixed_s: float = 0.0
    unit_s: float = 0.0  # a unit of the amount
    context_s: float = 0.0  # a unit of the amount and a token of the context

    def estimate_s(self, amount: int, context: float = 0.0) -> float:
        return self.fixed_s + amount * (self.unit_s + context * self.context_s)

    def scale(self, factor: float) -> "DurationModel":
        return DurationModel(self.fixed_s * factor, self.unit_s * factor, self.context_s * factor)


def fit_durations(
    usual: Sequence[WorkDuration], assumed: DurationModel, sizes: Iterable[tuple[int, int]]
) -> DurationModel:
    """Model with the least absolute errors of the logarithms, without negative parts: outliers do not count.

    `usual` ends with the most recently measured class, which weighs most: a machine's speed changes with its load.
    The `assumed` model, scaled to what was measured, stands at the `sizes` (amount and context), with little weight:
    a single duration would not say how others grow with size.
    """
    if not usual:
        return assumed
    ratios = [each.seconds / assumed.estimate_s(each.amount, each.context) for each in usual]
    scaled = assumed.scale(max(median_low(ratios), SECONDS_MIN))
    points = [
        (each.amount, each.context, each.seconds, min(each.count / COUNT_TRUSTED, 1.0) / rank)
        for rank, each in enumerate(reversed(usual), start=1)
    ]
    points += [(amount, context, scaled.estimate_s(amount, context), ASSUMED_WEIGHT) for amount, context in sizes]
    model = _fit_squares(points)
    for _ in range(ITERATIONS):
        model = _fit_squares([_weigh_by_error(model, *point) for point in points])
    return model


def _weigh_by_error(
    model: DurationModel, amount: int, context: int, seconds: float, weight: float
) -> tuple[int, int, float, float]:
    """Point with the weight that makes the square of its relative error its logarithm's absolute error."""
    ratio = max(model.estimate_s(amount, context), SECONDS_MIN) / max(seconds, SECONDS_MIN)
    return amount, context, seconds, weight / (ratio * max(abs(math.log(ratio)), ERROR_MIN))


def _fit_squares(points: Iterable[tuple[int, int, float, float]]) -> DurationModel:
    """Fit to points of amount, context, seconds and weight with the least squares of relative errors.

    The best of all choices of parts that are not 0.
    """
    products, targets = [[0.0] * 3 for _ in range(3)], [0.0] * 3
    for amount, context, seconds, weight in points:
        row = [part / max(seconds, SECONDS_MIN) for part in (1.0, float(amount), float(amount) * context)]
        for i, left in enumerate(row):
            targets[i] += weight * left
            for j, right in enumerate(row):
                products[i][j] += weight * left * right
    best, least = DurationModel(), 0.0
    for parts in (each for count in (1, 2, 3) for each in combinations(range(3), count)):
        if (solution := _solve(products, targets, parts)) and min(solution) >= 0.0:
            loss = -sum(value * targets[part] for value, part in zip(solution, parts, strict=True))
            if loss < least * (1 + PIVOT_MIN) - PIVOT_MIN:
                values = dict(zip(parts, solution, strict=True))
                best, least = DurationModel(*(values.get(part, 0.0) for part in range(3))), loss
    return best


def _solve(products: Matrix, targets: Sequence[float], parts: Sequence[int]) -> list[float]:
    """Solve the normal equations of these parts by elimination; [] where they are singular."""
    if any(products[i][i] <= 0.0 for i in parts):
        return []
    scales = [products[i][i] ** -0.5 for i in parts]  # to a diagonal of 1
    rows = [
        [*(products[i][j] * a * b for j, b in zip(parts, scales, strict=True)), targets[i] * a]
        for i, a in zip(parts, scales, strict=True)
    ]
    for column, pivot_row in enumerate(rows):  # no exchange of rows: the matrix is positive semi-definite
        if (pivot := pivot_row[column]) < PIVOT_MIN:
            return []
        for other in rows:
            if other is not pivot_row:
                factor = other[column] / pivot
                other[:] = [mine - factor * theirs for mine, theirs in zip(other, pivot_row, strict=True)]
    return [row[-1] / row[column] * scales[column] for column, row in enumerate(rows)]
