"""What tables say of the ranks of a job."""
