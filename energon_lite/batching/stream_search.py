"""Kernels of the streaming packer: what is buffered, and the search for what fills a pack.

All they know is in one table of int64, since each array makes a call from Python 0.2 µs longer. It
has P columns; R is the number of resources. Its first rows are:

- `HEADER`: single numbers, at the places named below, and blocks of R numbers from `CAPACITY` on.
- `KEYS`, `SLOTS`: the buffered samples, shortest first, of equal ones the newest first: the length
  in the resource `SORTED_BY`, and the slot. A slot of -1 is a gap, which keeps a key in order: a
  sample leaves a gap, and one that comes moves those up to the nearest gap.
- `PATH`, `BEST`: places in these two rows that the search has taken, and the best ones so far.
- `CHOSEN`: numbers of the samples of the last pack.
- `NUMBERS`: the number of the sample in each slot, or -1 where it has left.

Then R rows of lengths as they were added, and R rows of aligned ones, by slot; and R rows of the
room that is left in the pack, by the number of samples that the search has taken. Samples get slots
in the order in which they come: a lower slot has an older sample.
"""

from __future__ import annotations

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.compiled import kernel

HEADER, KEYS, SLOTS, PATH, BEST, CHOSEN, NUMBERS, LENGTHS = range(8)

# Places in the header.
(
    NUM_BUFFERED, TAIL, NUM_ADDED, OLDEST, SORTED_BY, BUFFER_SIZE, MAX_SAMPLES, MAX_STEPS, PRICE,
    NUM_PLACES, NUM_MOVED,
) = range(11)  # fmt: skip
CAPACITY = 11  # R capacities, then R alignments, then R totals

# The oldest samples fill a pack up to as much room as these many samples need in the mean; what
# fills the rest is searched for. A pack that is a large part of the buffer would otherwise
# have the long samples, and the next one those left behind.
_SEARCHED = 8
# Where `max_samples` is less than twice what a pack has in the mean, the search must leave as many
# short samples as come: it fills these sixteenths, and not less than four samples need.
_SEARCHED_IF_TIGHT, _SEARCHED_AT_LEAST = 11, 4

# A price is set where fewer than three samples fill a pack in the mean, for buffers of 32 and more:
# smaller ones show nothing. The largest capacity keeps all sums below 2**63.
_FEW, _LEAST_PRICED, _MAX_PRICED = 3, 32, 1 << 24
OF_NUMBER = 32  # the price that counts samples, where `max_samples` is scarce
_WEIGHT = 3  # a price counts three times as much as the length itself
_UNIT = 2520  # a multiple of k * (8 - q) for each price

# Samples are laid out again, with a gap after each fourth, once a quarter of them have come.
_PER_GAP, _LEAST_MOVED = 4, 4096

_ONE = np.uint64(1)


@kernel()
def _num_resources(table: Int64Array) -> int:
    return (len(table) - LENGTHS) // 3


@kernel()
def _close_gaps(table: Int64Array) -> None:
    """Moves samples to the first slots, in the same order."""
    header, numbers, moved_to = table[HEADER], table[NUMBERS], table[PATH]
    kept = 0
    for slot in range(header[TAIL]):
        if numbers[slot] >= 0:
            for row in range(NUMBERS, len(table)):
                table[row, kept] = table[row, slot]
            moved_to[slot] = kept
            kept += 1
    for place in range(header[NUM_PLACES]):
        if table[SLOTS, place] >= 0:
            table[SLOTS, place] = moved_to[table[SLOTS, place]]
    header[TAIL], header[OLDEST] = kept, 0


@kernel()
def _first_not_below(table: Int64Array, num: int, key: int) -> int:
    low, high = 0, num
    while low < high:
        middle = (low + high) >> 1
        if table[KEYS, middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@kernel()
def _key_of(table: Int64Array, slot: int) -> int:
    key: int = table[LENGTHS + _num_resources(table) + table[HEADER, SORTED_BY], slot]
    return key


@kernel()
def _place_of(table: Int64Array, slot: int) -> int:
    """The place in the sorted rows that a slot has; of equal keys, the oldest come last."""
    place = _first_not_below(table, table[HEADER, NUM_PLACES], _key_of(table, slot) + 1) - 1
    while table[SLOTS, place] != slot:
        place -= 1
    return place


# numba takes an index below 0 from the end. Unsigned ones need no such test, and the loop becomes
# a block move, several times as fast.
@kernel()
def _move_up(table: Int64Array, row: int, start: int, stop: int) -> None:
    j, end = np.uint64(stop), np.uint64(start)
    while j > end:
        table[row, j] = table[row, j - _ONE]
        j -= _ONE


@kernel()
def _move_down(table: Int64Array, row: int, start: int, stop: int) -> None:
    j, end = np.uint64(start), np.uint64(stop)
    while j < end:
        table[row, j] = table[row, j + _ONE]
        j += _ONE


@kernel()
def _insert(table: Int64Array, slot: int) -> None:
    """Puts the newest sample into the sorted rows."""
    header, slots, key = table[HEADER], table[SLOTS], _key_of(table, slot)
    num_places = header[NUM_PLACES]
    place = _first_not_below(table, num_places, key)
    low, high = place - 1, place
    while high < num_places and slots[high] >= 0 and (low < 0 or slots[low] >= 0):
        low, high = low - 1, high + 1
    if high == num_places and num_places == table.shape[1]:  # the rows are full: a gap is before
        while slots[low] >= 0:
            low -= 1
    if low >= 0 and slots[low] < 0:
        place -= 1
        _move_down(table, KEYS, low, place)
        _move_down(table, SLOTS, low, place)
    else:
        header[NUM_PLACES] += high == num_places
        _move_up(table, KEYS, place, high)
        _move_up(table, SLOTS, place, high)
    table[KEYS, place], slots[place] = key, slot


@kernel()
def _lay_out(table: Int64Array) -> None:
    """Sorts all buffered samples, with gaps in between."""
    header, place = table[HEADER], 0
    slots = np.flatnonzero(table[NUMBERS, : header[TAIL]] >= 0)[::-1]
    keys = table[LENGTHS + _num_resources(table) + header[SORTED_BY]][slots]
    order, room = np.argsort(keys, kind="mergesort"), table.shape[1] - len(slots)
    for i in range(len(order)):
        table[KEYS, place], table[SLOTS, place] = keys[order[i]], slots[order[i]]
        place += 1
        if i % _PER_GAP == 0 and room > 0:
            table[KEYS, place], table[SLOTS, place] = keys[order[i]], -1
            place, room = place + 1, room - 1
    header[NUM_PLACES], header[NUM_MOVED] = place, 0


@kernel()
def _worth(price: int, capacity: int, length: int) -> int:
    """Returns the worth of a length to the search: itself, or what price and length ask for.

    A price p is a function of Burdett and Johnson [1] with p / 8 steps, k = p // 8 of them whole
    ones and q = p % 8 eighths: 0 below q / p of the capacity, then in turn rising by 1 / k and
    flat, up to 1. Samples that fit into a pack are together worth at most one pack, and at most
    what a sample of their total length would be. The sum over samples is a lower bound for their
    packs.

    Source: [1] C. Alves et al., "Dual-Feasible Functions for Integer Programming and Combinatorial
    Optimization", Springer 2016, section 2.3.
    """
    if price & 7 == 0:
        return length
    num_whole, eighths = price >> 3, price & 7
    rest, step = price * length, 8 * capacity
    worth = length * num_whole * (8 - eighths)
    while rest >= step:
        rest -= step
        worth += _WEIGHT * capacity * (8 - eighths)
    return worth + _WEIGHT * max(0, rest - eighths * capacity)


@kernel()
def _set_price(table: Int64Array) -> None:
    """Sets the price which proves that the buffered samples need the most packs.

    None is set where the sum of lengths proves the most; where their number does, that of samples.
    """
    header, keys = table[HEADER], table[KEYS]
    num_buffered, capacity = header[NUM_BUFFERED], header[CAPACITY]
    header[PRICE] = 0
    if header[BUFFER_SIZE] < _LEAST_PRICED or capacity > _MAX_PRICED:
        return
    keys = keys[: header[NUM_PLACES]][table[SLOTS, : header[NUM_PLACES]] >= 0]
    most = _UNIT * (1 + _WEIGHT) * keys.sum()
    by_number = _UNIT * (1 + _WEIGHT) * capacity * num_buffered // header[MAX_SAMPLES]
    if by_number > most:
        header[PRICE], most = OF_NUMBER, by_number
    is_few = _FEW * (header[CAPACITY + 2] // header[NUM_ADDED]) >= capacity
    for price in range(9, OF_NUMBER if is_few else 0):
        if price & 7:
            total = 0
            for place in range(num_buffered):
                total += _worth(price, capacity, keys[place])
            total *= _UNIT // ((price >> 3) * (8 - (price & 7)))
            if total > most:
                header[PRICE], most = price, total


@kernel()
def _fits(table: Int64Array, slot: int, size: int) -> bool:
    num = _num_resources(table)
    for r in range(num):
        if table[LENGTHS + num + r, slot] > table[LENGTHS + 2 * num + r, size]:
            return False
    return True


@kernel()
def _take(table: Int64Array, slot: int, size: int, new_size: int) -> None:
    num = _num_resources(table)
    for r in range(num):
        room = table[LENGTHS + 2 * num + r, size]
        table[LENGTHS + 2 * num + r, new_size] = room - table[LENGTHS + num + r, slot]


@kernel()
def _is_same(table: Int64Array, a: int, b: int) -> bool:
    num = _num_resources(table)
    is_same = True
    for row in range(LENGTHS + num, LENGTHS + 2 * num):
        is_same = is_same and table[row, a] == table[row, b]
    return is_same


@kernel()
def _first_with_length(table: Int64Array) -> int:
    """The first place of a sample that needs something of the scarcest resource."""
    num_places = table[HEADER, NUM_PLACES]
    place = _first_not_below(table, num_places, 1)
    while place < num_places and table[SLOTS, place] < 0:
        place += 1
    return place


@kernel()
def _search(table: Int64Array, places: int) -> int:
    """Looks for what is worth most in the scarcest resource, depth first, longest first.

    Returns how many samples those are; their places are in the row `BEST`, descending. The other
    resources only have to suffice. Samples that need none of the scarcest are left for later.
    """
    header, keys, slots, path = table[HEADER], table[KEYS], table[SLOTS], table[PATH]
    num, num_places, first = _num_resources(table), header[NUM_PLACES], _first_with_length(table)
    if first == num_places:
        return 0
    price, max_steps, each = header[PRICE], header[MAX_STEPS], 0
    capacity, room = header[CAPACITY], table[LENGTHS + 2 * num + header[SORTED_BY], 0]
    if price == OF_NUMBER:
        # The most samples seldom fill a pack: the search would take all steps.
        each, max_steps = _WEIGHT * capacity // header[MAX_SAMPLES], max_steps >> 4
    size = best_size = steps = 0
    missing = _worth(price, capacity, room) + each * places
    least = missing + 1
    place, shortest = num_places, keys[first]
    while True:
        # What is left is worth its room at most.
        lost = missing - each * (places - size) - _worth(price, capacity, room)
        if room >= shortest and place > first and size < places and lost < least:
            place = _first_not_below(table, place, room + 1) - 1
            while place >= first and (
                slots[place] < 0 or (num > 1 and not _fits(table, slots[place], size))
            ):
                place -= 1
        else:
            place = first - 1
        while place < first:
            if missing < least:
                least, best_size = missing, size
                for j in range(size):
                    table[BEST, j] = path[j]
            if size == 0 or least == 0 or steps >= max_steps:
                return best_size
            size -= 1
            place = path[size]
            key, last = keys[place], slots[place]
            room += key
            missing += _worth(price, capacity, key) + each
            # A shorter sample is worse unless there is room for one more. Another one of the same
            # lengths would lead to the same packs.
            longest = min(key - (num == 1), room - shortest) if size + 1 < places else -1
            while place >= first and (
                slots[place] < 0
                or keys[place] > longest
                or (num > 1 and not _fits(table, slots[place], size))
                or (num > 1 and keys[place] == key and _is_same(table, slots[place], last))
            ):
                place -= 1
        path[size] = place
        size += 1
        steps += 1
        room -= keys[place]
        missing -= _worth(price, capacity, keys[place]) + each
        if num > 1:
            _take(table, slots[place], size - 1, size)


@kernel()
def _scarcest(table: Int64Array) -> int:
    """The resource that needs the most packs."""
    header = table[HEADER]
    num = _num_resources(table)
    scarcest = most = 0
    for r in range(num):
        capacity, total = header[CAPACITY + r], header[CAPACITY + 2 * num + r]
        packs = ((total // capacity) << 20) + ((total % capacity) << 20) // capacity
        if packs > most:
            scarcest, most = r, packs
    return scarcest


@kernel()
def _sort_by(table: Int64Array, resource: int) -> None:
    header = table[HEADER]
    if resource != header[SORTED_BY]:
        header[SORTED_BY] = resource
        _lay_out(table)


@kernel()
def _searched_room(table: Int64Array) -> int:
    """The room that is left to the search."""
    header, num = table[HEADER], _num_resources(table)
    capacity = header[CAPACITY + header[SORTED_BY]]
    total, added = header[CAPACITY + 2 * num + header[SORTED_BY]], header[NUM_ADDED]
    room: int = _SEARCHED * total // added
    if header[MAX_SAMPLES] < 2 * (added // max(total // capacity, 1)):
        room = max(capacity * _SEARCHED_IF_TIGHT // 16, _SEARCHED_AT_LEAST * total // added)
    return room


@kernel()
def _choose_place(table: Int64Array, place: int, num_chosen: int) -> int:
    """Puts a sample into the pack, by slot; returns how many it then has."""
    chosen, slot, j = table[CHOSEN], table[SLOTS, place], num_chosen
    while j > 0 and chosen[j - 1] > slot:  # not often: most come in order
        chosen[j] = chosen[j - 1]
        j -= 1
    chosen[j] = slot
    _take(table, slot, 0, 0)
    table[SLOTS, place] = -1
    table[HEADER, NUM_BUFFERED] -= 1
    return num_chosen + 1


@kernel()
def _choose_oldest(table: Int64Array) -> int:
    """Takes the oldest sample, and the next ones while there is much room; returns how many."""
    while table[NUMBERS, table[HEADER, OLDEST]] < 0:
        table[HEADER, OLDEST] += 1
    searched = _searched_room(table)
    num_chosen, slot = 0, table[HEADER, OLDEST]
    row = LENGTHS + 2 * _num_resources(table) + table[HEADER, SORTED_BY]
    while num_chosen < table[HEADER, MAX_SAMPLES] and slot < table[HEADER, TAIL]:
        if num_chosen and table[row, 0] <= searched:
            break
        is_next = num_chosen == 0 or _key_of(table, slot) > 0
        if is_next and table[NUMBERS, slot] >= 0 and _fits(table, slot, 0):
            num_chosen = _choose_place(table, _place_of(table, slot), num_chosen)
        slot += 1
    return num_chosen


@kernel()
def _choose(table: Int64Array) -> int:
    """Takes the samples of the next pack out, writes slots to `CHOSEN`; returns how many."""
    header, num = table[HEADER], _num_resources(table)
    for r in range(num):
        table[LENGTHS + 2 * num + r, 0] = header[CAPACITY + r]
    if num > 1:
        _sort_by(table, _scarcest(table))
    num_chosen = _choose_oldest(table)
    num_found = _search(table, header[MAX_SAMPLES] - num_chosen)
    for j in range(num_found):
        num_chosen = _choose_place(table, table[BEST, j], num_chosen)
    # What needs none of the scarcest: texts, where images fill the packs.
    for place in range(header[NUM_PLACES] - 1 if num > 1 else -1, -1, -1):
        is_allowed = num_chosen < header[MAX_SAMPLES] and table[SLOTS, place] >= 0
        if is_allowed and _fits(table, table[SLOTS, place], 0):
            num_chosen = _choose_place(table, place, num_chosen)
    return num_chosen


@kernel("(int64[:, ::1],)")
def choose_next(table: Int64Array) -> int:
    """Writes the samples of the next pack to `CHOSEN`; returns how many."""
    num_chosen, numbers = _choose(table), table[NUMBERS]
    for j in range(num_chosen):
        slot = table[CHOSEN, j]
        table[CHOSEN, j] = numbers[slot]
        numbers[slot] = -1
    return num_chosen


@kernel("(int64[:, ::1],)")
def is_full(table: Int64Array) -> bool:
    """Returns whether enough samples are buffered."""
    num_buffered = table[HEADER, NUM_BUFFERED]
    if num_buffered < table[HEADER, BUFFER_SIZE]:
        return False
    if num_buffered // 4 >= table[HEADER, MAX_SAMPLES]:
        return True
    num = _num_resources(table)
    for r in range(num):
        # num_buffered >= 4 * capacity * added / total, without a product above 2**63.
        capacity, total = table[HEADER, CAPACITY + r], table[HEADER, CAPACITY + 2 * num + r]
        missing = 4 * table[HEADER, NUM_ADDED] - num_buffered * (total // capacity)
        if missing < num_buffered and missing * capacity <= num_buffered * (total % capacity):
            return True
    return False


@kernel("(int64[:, ::1], int64[:, ::1], int64[::1])")
def add(table: Int64Array, lengths_NR: Int64Array, numbers_N: Int64Array) -> int:
    """Aligns, counts and sorts samples, whose numbers rise; returns how many.

    Where all slots are taken, it first frees those of samples that have left. It stops if more than
    half are taken even so: a larger table has to be seldom tidied up.
    """
    header, num = table[HEADER], _num_resources(table)
    num_moved = header[NUM_MOVED] + len(lengths_NR)
    keeps_order = _PER_GAP * num_moved <= header[NUM_BUFFERED] + _LEAST_MOVED
    for index in range(len(lengths_NR)):
        if header[TAIL] == table.shape[1]:
            if not keeps_order:
                _lay_out(table)
            _close_gaps(table)
            if 2 * header[TAIL] > table.shape[1]:
                return index
        slot = header[TAIL]
        table[NUMBERS, slot] = numbers_N[index]
        header[NUM_ADDED] += 1
        for r in range(num):
            align, length = header[CAPACITY + num + r], lengths_NR[index, r]
            table[LENGTHS + r, slot] = length
            if align > 1:
                length = (length + align - 1) // align * align
            table[LENGTHS + num + r, slot] = length
            header[CAPACITY + 2 * num + r] += length
        header[TAIL] = slot + 1
        header[NUM_BUFFERED] += 1
        header[NUM_MOVED] += 1
        # Nothing but the price has to be saved: when the next one is set follows from the number.
        sets_price = num == 1 and header[NUM_ADDED] % header[BUFFER_SIZE] == 0
        if keeps_order:
            _insert(table, slot)
        elif sets_price or index == len(lengths_NR) - 1:
            _lay_out(table)
        if sets_price:
            _set_price(table)
    return len(lengths_NR)


@kernel("(int64[:, ::1], int64[:, ::1], int64[::1], int64[::1], int64[::1])")
def choose_all(
    table: Int64Array,
    lengths_NR: Int64Array,
    indices: Int64Array,
    offsets: Int64Array,
    progress: Int64Array,
) -> bool:
    """Packs a whole stream; false where it stops because the table is full.

    Fills `indices` and `offsets`; `progress` has the samples read, the samples packed, the packs,
    and R numbers: how much may stay free in the packs to come. It resumes from there with a larger
    table. As soon as more stays free it ends, with samples that are not packed.
    """
    num_samples, num = lengths_NR.shape
    numbers = np.arange(num_samples)
    while progress[1] < num_samples:
        while progress[0] < num_samples and not is_full(table):
            rows = slice(progress[0], progress[0] + 1)
            if not add(table, lengths_NR[rows], numbers[rows]):
                return False
            progress[0] += 1
        num_chosen = choose_next(table)
        for j in range(num_chosen):
            indices[progress[1] + j] = table[CHOSEN, j]
        progress[1] += num_chosen
        progress[2] += 1
        offsets[progress[2]] = progress[1]
        for r in range(num):
            progress[3 + r] -= table[LENGTHS + 2 * num + r, 0]
            if progress[3 + r] < 0:
                return True
    return True
