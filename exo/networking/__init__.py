"""Between nodes: discovery, the gRPC peer and server, tensors on the wire."""
