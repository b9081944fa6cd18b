"""Where a method or an objective was published, and a method's place in the Adversarial Pruning Benchmark.

Both are attributes of the class that they describe. The words of the enumerations are those of the benchmark's file.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Paper:
    """A publication.

    Arguments:
        title: of the paper.
        authors: full names or surnames, in the paper's order.
        venue: where it was published.
        year: of the publication.
        link: to the paper.

    Example:
        paper = harp.Paper("Holistic Adversarially Robust Pruning", ("Zhao", "Wressnegger"), "ICLR", 2023)
        print(paper.cited)
    """

    title: str
    authors: tuple[str, ...]
    venue: str
    year: int
    link: str = ""

    @property
    def surnames(self) -> tuple[str, ...]:
        """The last word of every author's name."""
        return tuple(author.split()[-1] for author in self.authors)

    @property
    def cited(self) -> str:
        """The authors as a text cites them: `Zhao and Wressnegger`, `Ye et al.`."""
        return f"{self.surnames[0]} et al." if len(self.authors) > 2 else " and ".join(self.surnames)

    def __str__(self) -> str:
        return f"{self.cited}, “{self.title}”, {self.venue} {self.year}"


class Criterion(StrEnum):
    """By what a method chooses what to prune.

    Example:
        print(harp.Criterion.MAGNITUDE)
    """

    MAGNITUDE = "Lowest Weight Magnitude LWM"
    SOLVER = "Solver Based LWM (SOLWM)"
    REGULARISED = "Sparsity Based LWM (SPALWM)"
    SCORE = "Least Importance Score (LIS)"
    SAMPLING = "Bayesian Connectivity Sampling (BCS)"
    RANDOM = "Random"


class Locality(StrEnum):
    """Whether weights compete within their layer or across the network.

    Example:
        print(harp.Locality.GLOBAL)
    """

    LOCAL = "Local Pruning (L)"
    GLOBAL = "Global Pruning (G)"


class Structure(StrEnum):
    """What is taken out."""

    WEIGHTS = "Unstructured (US)"
    CHANNELS = "Structured (S) channels"


@dataclass(frozen=True)
class Taxonomy:
    """A method's criterion, and its locality where no strategy of the recipe decides it.

    Published methods are put where the benchmark's own file has them. Where that file and the benchmark's page differ
    (DNR: a learned score or a solver), the file counts.

    Arguments:
        criterion: by what it chooses.
        locality: whether weights compete within their layer; None: a strategy decides it.
        strategy: that decides the locality if the recipe names none.
        structure: what is taken out.

    Example:
        taxonomy = harp.Taxonomy(harp.Criterion.SCORE, harp.Locality.GLOBAL)
    """

    criterion: Criterion
    locality: Locality | None = None
    strategy: str = "uniform"
    structure: Structure = Structure.WEIGHTS
