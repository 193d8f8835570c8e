"""Share of draft tokens that turn out right, by source and length of the match.  Engine thread."""

from warmline_backend.speculation.draft import DRAFT_MODEL, GRAMMAR, LENGTH_CLASSES, DraftClass

# Before anything is known: by the class of a match's length.
USUAL_ACCEPTANCE = (0.3, 0.5, 0.7, 0.85, 0.95)
assert len(USUAL_ACCEPTANCE) == LENGTH_CLASSES
USUAL_BY_SOURCE = {
    GRAMMAR: 0.9,  # it forces text; the model may split it into other tokens
    DRAFT_MODEL: 0.6,
}
PRIOR_WEIGHT = 4.0  # tokens that what is expected counts as
ANSWER_DECAY, PROCESS_DECAY = 0.95, 0.998  # weight of what was seen before, with each draft


class Acceptance:
    """Acceptance as seen in one answer, which begins with what all answers of the process have seen, or in those.

    What is seen in an answer counts for its process, too.
    """

    def __init__(self, process: "Acceptance | None" = None) -> None:
        self._process, self._decay = process, PROCESS_DECAY if process is None else ANSWER_DECAY
        self._accepted: dict[DraftClass, float] = {}
        self._rejected: dict[DraftClass, float] = {}

    def estimate(self, draft_class: DraftClass) -> float:
        """Probability that a draft's next token is right, those before it being so."""
        accepted, rejected = self._accepted.get(draft_class, 0.0), self._rejected.get(draft_class, 0.0)
        expected = _get_usual(draft_class) if self._process is None else self._process.estimate(draft_class)
        return (accepted + PRIOR_WEIGHT * expected) / (accepted + rejected + PRIOR_WEIGHT)

    def record(self, draft_class: DraftClass, accepted: int, *, has_rejected: bool) -> None:
        """Record a draft whose first `accepted` tokens were right, and the next one wrong, unless there was none."""
        for counts, count in ((self._accepted, accepted), (self._rejected, int(has_rejected))):
            counts[draft_class] = counts.get(draft_class, 0.0) * self._decay + count
        if self._process is not None:
            self._process.record(draft_class, accepted, has_rejected=has_rejected)


def _get_usual(draft_class: DraftClass) -> float:
    source, length_class = draft_class
    return USUAL_BY_SOURCE.get(source, USUAL_ACCEPTANCE[length_class])
