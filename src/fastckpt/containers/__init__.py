"""Containers: what pieces a checkpoint has, and where in the source they lie. Each module turns a Source into Records."""
