"""The training run: its wiring, the loop that reads as the algorithm, evaluation, folder and logs."""
