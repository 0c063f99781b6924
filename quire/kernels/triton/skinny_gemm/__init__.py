"""GEMMs of few rows, with the preceding norm and the following activation fused."""
