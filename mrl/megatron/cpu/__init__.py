"""What only a run on a CPU needs: corrections of Megatron-Core at its import, and compiled layers."""
