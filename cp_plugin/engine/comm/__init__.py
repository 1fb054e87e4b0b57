"""Meshes (named axes of ranks and verbs that move tensors along them) and the ledger of their traffic."""

from cp_plugin.engine.comm.connect import ConnectError as ConnectError
from cp_plugin.engine.comm.connect import connect as connect
from cp_plugin.engine.comm.connect import device_of as device_of
from cp_plugin.engine.comm.connect import network_between as network_between
from cp_plugin.engine.comm.group import GroupMesh as GroupMesh
from cp_plugin.engine.comm.group import MessageError as MessageError
from cp_plugin.engine.comm.group import Named as Named
from cp_plugin.engine.comm.mesh import WHOLE as WHOLE
from cp_plugin.engine.comm.mesh import Ledger as Ledger
from cp_plugin.engine.comm.mesh import Mesh as Mesh
from cp_plugin.engine.comm.mesh import Pending as Pending
from cp_plugin.engine.comm.mesh import TraceMesh as TraceMesh
from cp_plugin.engine.comm.mesh import Traffic as Traffic
from cp_plugin.engine.comm.mesh import axis_groups as axis_groups
from cp_plugin.engine.comm.mesh import coordinates as coordinates
from cp_plugin.engine.comm.mesh import flat_index as flat_index
from cp_plugin.engine.comm.mesh import sums as sums
from cp_plugin.engine.comm.threads import ThreadMesh as ThreadMesh
from cp_plugin.engine.comm.threads import run_threads as run_threads
