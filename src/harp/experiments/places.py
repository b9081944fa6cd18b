"""Where the files of a run are on this machine: its data, the file of its model and its weights.

`places.json` in the run's folder remembers them, so that later commands find them from any working directory. It is no
part of the run's identity, and nothing that is shared is made from it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harp import models
from harp.data import registry
from harp.errors import DataError, ModelError
from harp.experiments.recipe import Model, Recipe
from harp.system import files
from harp.system.progress import Quiet

FILE = "places.json"
_LARGEST = 1 << 16  # bytes of the file


@dataclass(frozen=True)
class Places:
    """Absolute paths; None for what the run does not read from a file, or what is not known.

    `data` is the folder of a data set that has a name, or the data itself.
    """

    data: Path | None = None
    model: Path | None = None
    weights: Path | None = None

    @classmethod
    def of(cls, recipe: Recipe, data_dir: Path | None, *, has_files: bool = True) -> Self:
        """The places of a recipe's files as the current working directory has them; `has_files`: so does its data."""
        model, weights = models.source_file(recipe.model.name), recipe.model.weights
        return cls(
            registry.find(recipe.data.name, data_dir).path.absolute() if has_files else None,
            None if model is None else Path(model).expanduser().absolute(),
            None if weights is None else Path(weights).absolute(),
        )

    def write(self, folder: Path) -> None:
        """Write them into a run's folder."""
        files.write_json(folder / FILE, {key: None if path is None else str(path) for key, path in vars(self).items()})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Those of a run's folder; none are known of older runs."""
        path = folder / FILE
        content = files.read_json(path, _LARGEST) if path.is_file() else {}
        known = {key: content.get(key) for key in ("data", "model", "weights")}
        return cls(**{key: Path(text) for key, text in known.items() if isinstance(text, str)})

    def load(
        self, recipe: Recipe, data_dir: Path | None, name: str | None, size: int | None, display: Quiet | None = None
    ) -> registry.DataSet:
        """The run's data, or other data of a name, at the size of the run's images."""
        part = recipe.data.model_copy(update={"size": size}) if size is not None else recipe.data
        own = recipe.data.name
        is_other = name is not None and name != own
        if data_dir is not None or self.data is None or (is_other and name is not None and registry.is_path(name)):
            return part.load(data_dir, name=name, display=display)
        if self.data.exists():
            if not registry.is_path(own):
                return part.load(self.data, name=name, display=display)
            return part.load(None, name=name if is_other else str(self.data), display=display)
        try:
            return part.load(None, name=name, display=display)
        except DataError as error:
            if is_other:
                raise
            raise DataError(f"the data was at {self.data} and is not there any more: give --data-dir") from error

    def model_of(self, recipe: Recipe) -> Model:
        """The model of the recipe, by the place of its file."""
        written = models.source_file(recipe.model.name)
        if written is None or self.model is None:
            return recipe.model
        if self.model.is_file():
            function = recipe.model.name.rpartition(":")[2]
            return recipe.model.model_copy(update={"name": f"{self.model}:{function}"})
        if Path(written).expanduser().is_file():
            return recipe.model
        raise ModelError(f"the model was at {self.model} and is not there any more: put it back, or at {written}")

    def weights_of(self, recipe: Recipe) -> Path | None:
        """The weights that the recipe starts from, if they are still there."""
        given = recipe.model.weights
        paths = [*([] if self.weights is None else [self.weights]), *([] if given is None else [Path(given)])]
        return next(filter(Path.is_file, paths), None)
