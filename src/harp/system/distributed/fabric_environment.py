"""The place of a process as a cluster environment of Lightning Fabric."""

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment

from harp.system.distributed.environment import Place


class Cluster(ClusterEnvironment):
    """Processes that are already started, so that Fabric does not detect a scheduler itself."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    @property
    def creates_processes_externally(self) -> bool:
        """True: Fabric starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """The address of process 0."""
        return self.place.address

    @property
    def main_port(self) -> int:
        """The port of process 0."""
        return self.place.port

    @staticmethod
    def detect() -> bool:
        """False: this environment is passed to Fabric explicitly."""
        return False

    def world_size(self) -> int:
        """The number of processes."""
        return self.place.world

    def set_world_size(self, size: int) -> None:
        """Ignored: the place is fixed."""

    def global_rank(self) -> int:
        """The rank of this process in the run."""
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the place is fixed."""

    def local_rank(self) -> int:
        """The rank of this process on its machine, which is the number of its device."""
        return self.place.local

    def node_rank(self) -> int:
        """The number of the machine."""
        return self.place.node
