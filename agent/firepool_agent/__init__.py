"""The in-pod agent: standard library and h11; starts fast, runs next to untrusted code."""
