"""The predictor of many draws at many rows, in NumPy: vectorised over draws, in chunks that fit into the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.protocol import Function
from ppl_bnn.core import arrays
from ppl_bnn.core.arrays import Array, chunks, map_data, padded, power_of_two, row_count
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import recorded_linear

if TYPE_CHECKING:
    from ppl_bnn.backends.program import Program

# Site -> draws, in NumPy, with one leading axis (or one set of values).
Draws = Mapping[str, np.ndarray]
# Bytes that a prediction may take by default, besides its inputs and its result.
MEMORY = 2**28
# Bytes that the activations of a density over many draws may take.
DENSITY_MEMORY = 2**28
# Bytes and rows of a chunk of predictions on a CPU, where the budget allows more.
CACHE, CACHE_ROWS = 2**24, 2000
# The same if every core has its own chunk, whose size is at least a multiple of the weights of a draw, because
# weights are read again for every chunk of rows.
OWN_CACHE, OWN_CACHE_ROWS, OWN_CACHE_WEIGHTS = 2**21, 500, 4
# Bytes of activations and weights, over all draws and rows, that take less time to compute than a program to compile.
# Draws in one call of such a program.
SMALL, SMALL_DRAWS = 2**26, 512


def chunked_draws(
    program: Program,
    key: Hashable,
    function: Function,
    w: Draws,
    x: Any,
    fixed: Any,
    one: Draws,
    memory: int,
    columns_of: Callable[[int], int] = lambda columns: columns,
) -> np.ndarray:
    """eta (S, N, D) of function(w, x, fixed) over draws w; `one` is a single set of constrained values.

    One compiled function is used for all chunks (the last is padded). The function has `columns_of(D)` columns.
    """
    system = program.system
    count, rows = len(next(iter(w.values()))), row_count(x)
    per_row, stored = _bytes_per_row(program, one, x)
    stored = 8 * columns_of(stored // 8)
    weights = sum(8 * math.prod(value.shape[1:]) for value in w.values())
    like = system.asarray(np.zeros(1))
    work, row_chunk, threads = memory, rows, 1
    if arrays.on_cpu(like):
        # Activations that fit in the cache are not written to memory; larger batches were up to six times slower.
        work, row_chunk, threads = CACHE, CACHE_ROWS, system.threads()
        if threads > 1:
            work, row_chunk = int(np.clip(OWN_CACHE_WEIGHTS * weights, OWN_CACHE, CACHE)), OWN_CACHE_ROWS
        work = min(memory // threads, work)
    row_chunk = rows if program.coupled else max(1, min(rows, row_chunk, work // per_row))
    batch = max(1, min(count, work // (per_row * row_chunk)))
    # The values of a call are stored up to four times: in the batches, joined, and passed on.
    draw_chunk = memory // (4 * (weights + threads * stored * row_chunk))
    # If all rows are one chunk, threads share the draws instead, provided that there is enough work.
    if row_chunk == rows and count * rows * per_row >= threads * OWN_CACHE:
        draw_chunk = min(draw_chunk, -(-count // threads))
    draw_chunk = int(np.clip(draw_chunk, batch, count))
    small = count * rows * (per_row + weights) <= min(SMALL, memory // 4)
    if small and system.static_shapes and not program.coupled:
        # Predictions with similar numbers of rows and draws share the program.
        row_chunk, batch = power_of_two(rows), min(power_of_two(count), SMALL_DRAWS)
        draw_chunk = batch

    def columns(w: Mapping[str, Array], given: tuple[Any, Any]) -> Array:
        # Each column of eta is contiguous, because predictions are read column by column.
        return function(w, *given).T

    batched = program.cached((key, batch), lambda: system.batched(columns, batch))
    result = np.empty((count, stored // 8, rows), dtype=system.to_numpy(like).dtype)

    def fill(values: dict[str, Array], of_draws: tuple[int, int], of_rows: tuple[int, int]) -> None:
        part = map_data(lambda a: system.asarray(padded(a[slice(*of_rows)], row_chunk)), x)
        batched(values, (part, fixed), result[slice(*of_draws), :, slice(*of_rows)])

    def pieces() -> Iterator[tuple[Any, ...]]:
        for of_draws in chunks(count, draw_chunk):
            part = slice(*of_draws)
            values = {name: system.asarray(padded(value[part], draw_chunk)) for name, value in w.items()}
            for of_rows in chunks(rows, row_chunk):
                yield values, of_draws, of_rows

    system.each(fill, pieces(), threads)
    return result.transpose(0, 2, 1)


def seeded_draws(program: Program, w: Draws, x: Any, seed: int, memory: int) -> np.ndarray:
    """eta (S, N, D) of programs that draw random numbers: per-row variables, and plain models of a system."""
    system = program.system
    count, rows = len(next(iter(w.values()))), row_count(x)
    # The memory of a row is unknown for such a model: a wide layer is assumed.
    per_row = 8 * 256
    work = min(memory, CACHE) if arrays.on_cpu(system.asarray(np.zeros(1))) else memory
    whole = program.has_local or program.coupled
    row_chunk = rows if whole else max(1, min(rows, CACHE_ROWS, work // per_row))
    batch = max(1, min(count, work // (per_row * row_chunk)))

    def one_by_one(w: Mapping[str, Array], x: Any, seeds: Any) -> Array:
        draws = ({name: value[index] for name, value in w.items()} for index in range(len(seeds)))
        keys = arrays.iterate_seeds(seeds)
        return ops.stack([program.predictor(each, x, key) for each, key in zip(draws, keys, strict=True)], 0)

    def build() -> Callable[..., Any]:
        if program.has_local and not system.maps_randomness:
            # Setting a seed is an effect outside of the arrays, which a record would not repeat.
            return system.compile_for(one_by_one, ())
        return system.compile(system.vmap(program.predictor, in_axes=(0, None, 0)))

    function = program.cached("seeded predictor", build)
    seeds = system.to_numpy(system.seeds(seed, count))
    result: Any = None
    for start, stop in chunks(count, batch):
        values = {name: system.asarray(padded(v[start:stop], batch)) for name, v in w.items()}
        keys = system.asarray(padded(seeds[start:stop], batch))
        for first, last in chunks(rows, row_chunk):
            part = map_data(lambda a, i=first, j=last: system.asarray(padded(a[i:j], row_chunk)), x)
            eta = system.to_numpy(function(values, part, keys))
            if result is None:
                result = np.empty((count, rows, eta.shape[-1]), dtype=eta.dtype)
            result[start:stop, first:last] = eta[: stop - start, : last - first]
    return result


def _bytes_per_row(program: Program, one: Draws, x: Any) -> tuple[int, int]:
    """Bytes of one row of one draw during the computation (inputs and outputs of all linear maps), and after it."""
    # Where rows interact, a single row is not a valid input of the model.
    first = map_data(lambda a: np.asarray(a if program.coupled else a[:1]), x)
    output, inputs = recorded_linear(program.model, one, first)
    during = sum(int(np.prod(np.shape(part)[1:])) for parts in inputs.values() for part in parts)
    after = int(np.shape(output.predictor)[-1])
    return 8 * 2 * (during + after), 8 * after
