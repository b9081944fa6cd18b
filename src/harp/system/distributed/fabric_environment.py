"""The place of a process as Lightning Fabric wants to be told it."""

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment

from harp.processes.placement import Place


class Cluster(ClusterEnvironment):
    """Processes that somebody else has started; Fabric is not to look for a scheduler of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    @property
    def creates_processes_externally(self) -> bool:
        """Fabric starts none."""
        return True

    @property
    def main_address(self) -> str:
        """Where the first process is."""
        return self.place.address

    @property
    def main_port(self) -> int:
        """Where it listens."""
        return self.place.port

    @staticmethod
    def detect() -> bool:
        """It is given, not detected."""
        return False

    def world_size(self) -> int:
        """The number of processes."""
        return self.place.world

    def set_world_size(self, size: int) -> None:
        """It is what it is."""

    def global_rank(self) -> int:
        """This process's number among all."""
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """It is what it is."""

    def local_rank(self) -> int:
        """Its number on this machine, which is that of its device."""
        return self.place.local

    def node_rank(self) -> int:
        """The number of the machine."""
        return self.place.node
