"""The command line."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # for gRPC, once imported: a failed handshake is no line
