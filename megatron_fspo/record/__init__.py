"""What a run leaves in its folder and with trackers: rows, sequences, samples; `status` reads them."""
