"""Runs batches on a device. Owns every device tensor; knows no request and no budget."""
