"""Predictions and what is computed from them: scores, calibration, intervals."""
