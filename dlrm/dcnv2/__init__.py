"""DLRM-DCNv2, the recommender of MLPerf Training v3.0 to v6.0."""
