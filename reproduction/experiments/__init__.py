"""Experiments beyond the paper: estimators of Q where the truth is known, and Q against EKFAC."""
