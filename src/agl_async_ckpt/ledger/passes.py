"""Which pass over the dataset a row belongs to, counted from the rows that were drawn."""

from __future__ import annotations

from agl_async_ckpt.ledger.entry import Start


class PassCounter:
    """Counts the rows of the loader's current pass.

    The trainer's epoch tells the pass of the last row of a pull only; a pull may span two. The end of a pass is known
    from the number of its rows.
    """

    def __init__(self, start: Start, *, num_ahead: int = 0) -> None:
        """Begin where a life begins; `num_ahead` rows are read as a batch of their own before the loader goes on."""
        self._start = start
        self._epoch = start.epoch
        self.rows: int | None = start.loader_rows
        """Rows of the pass that were handed out; None once it cannot be known."""
        self._left: int | None = None if self.rows is None else num_ahead + start.rows_left(self.rows + num_ahead)

    def draw(self, num_rows: int, *, epoch: int) -> tuple[tuple[int, int], ...]:
        """Tell the epochs of the next `num_rows` rows.

        Args:
            num_rows: Drawn by one pull.
            epoch: The trainer's epoch after the pull.

        Returns:
            (epoch, number of rows), in the order of drawing.
        """
        if num_rows == 0:
            return ()
        if self.rows is None or self._left is None:
            return self._give_up(num_rows, epoch)
        drawn: list[tuple[int, int]] = []
        wanted = num_rows
        while wanted > 0 and self._epoch <= epoch:
            taken = min(wanted, self._left)
            if taken:
                drawn.append((self._epoch, taken))
            wanted, self.rows, self._left = wanted - taken, self.rows + taken, self._left - taken
            if wanted > 0:
                self._epoch, self.rows, self._left = self._epoch + 1, 0, self._start.rows_per_pass
        if wanted or self._epoch != epoch:  # a trainer that counts otherwise
            return self._give_up(num_rows, epoch)
        return tuple(drawn)

    def _give_up(self, num_rows: int, epoch: int) -> tuple[tuple[int, int], ...]:
        """Go by the trainer's count alone."""
        self.rows = self._left = None
        return ((epoch, num_rows),)
