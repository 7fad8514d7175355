"""The real vLLM, its build for CPUs, inside ranks of the tests."""
