"""Small messages between all ranks of a mesh, apart from payloads: collectives, the control plane, the edge's broadcasts."""
