import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.data.order import Epochs, GrowingWindow, Mixture

SIZES = (7, 3, 20)
SHARES = (0.5, 0.3, 0.2)
ENDS = (7, 10, 30)


def mixture(seed=0, *, shuffle=True):
    orders = [Epochs(size, f"{seed}/{index}", shuffle=shuffle) for index, size in enumerate(SIZES)]
    return Mixture(orders, SIZES, SHARES, seed)


def file_of(row):
    return next(index for index, end in enumerate(ENDS) if row < end)


@given(start=st.integers(0, 3000), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 3))
def test_the_rows_of_a_mixture_follow_from_seed_and_position_alone(start, sizes, seed):
    stop = start + sum(sizes)
    whole = mixture(seed).rows(0, stop)[start:].tolist()
    fresh, parts = mixture(seed), []
    for size in sizes:
        parts += fresh.rows(start, start + size).tolist()
        start += size
    assert parts == whole


def test_a_mixture_draws_in_the_shares_asked_for():
    files = torch.tensor([file_of(row) for row in mixture().rows(0, 20_000).tolist()])
    found = torch.bincount(files) / 20_000
    # Three standard deviations of the share of 20,000 draws are at most 0.0106.
    assert torch.allclose(found, torch.tensor(SHARES), atol=0.0106)


def test_each_file_of_a_mixture_is_passed_through_before_a_row_comes_again():
    drawn = mixture().rows(0, 2000).tolist()
    for index, size in enumerate(SIZES):
        own = [row for row in drawn if file_of(row) == index]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
        assert size == 3 or own[:size] != own[size : 2 * size]
    unshuffled = [row for row in mixture(shuffle=False).rows(0, 200).tolist() if file_of(row) == 1]
    assert unshuffled[:6] == [7, 8, 9, 7, 8, 9]


def test_the_mixture_follows_from_the_seed_and_is_the_same_for_good():
    """Runs resumed under another version must see the same rows; a change here breaks them."""
    assert mixture().rows(0, 12).tolist() == [21, 8, 9, 1, 7, 5, 4, 8, 2, 7, 0, 10]
    assert mixture(0).rows(0, 50).tolist() != mixture(1).rows(0, 50).tolist()


def test_an_epoch_by_difficulty_goes_from_easy_to_hard_and_ties_are_shuffled():
    difficulty = torch.tensor([2.0, 1.0, 2.0, 1.0, 2.0, 1.0])
    order = Epochs(6, 0, shuffle=True, difficulty=difficulty)
    epochs = [order.rows(6 * epoch, 6 * epoch + 6).tolist() for epoch in range(4)]
    for epoch in epochs:
        assert sorted(epoch[:3]) == [1, 3, 5] and sorted(epoch[3:]) == [0, 2, 4]
    assert len({tuple(epoch) for epoch in epochs}) > 1
    plain = Epochs(6, 0, shuffle=False, difficulty=difficulty)
    assert plain.rows(0, 6).tolist() == [1, 3, 5, 0, 2, 4]


def window(*, rows=20, batch=4, steps=5, seed=0):
    difficulty = torch.arange(rows, dtype=torch.float64).flip(0)
    return GrowingWindow(Epochs(rows, seed, shuffle=True), difficulty, steps * batch, seed)


def test_a_growing_window_lets_in_ever_harder_rows_and_then_all():
    order = window()
    hardest = [min(order.rows(start, start + 4).tolist()) for start in range(0, 20, 4)]
    # By hand: 4, 8, 12, 16 and 20 of 20 rows, of which the last are the easiest.
    assert all(found >= bound for found, bound in zip(hardest, (16, 12, 8, 4, 0), strict=True))
    assert sorted(order.rows(0, 4).tolist()) == [16, 17, 18, 19]
    assert sorted(order.rows(20, 40).tolist()) == list(range(20))


@given(position=st.integers(0, 30), batch=st.integers(1, 6))
def test_a_batch_of_a_window_follows_from_its_place_and_holds_no_row_twice(position, batch):
    order = window()
    rows = order.rows(position, position + batch).tolist()
    assert rows == window().rows(position, position + batch).tolist()
    assert len(set(rows)) == len(rows) or position + batch > 40 or position >= 20
