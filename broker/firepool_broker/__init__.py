"""The control plane: one pure engine behind one door, two shells that carry its effects out (see ARCHITECTURE.md)."""
