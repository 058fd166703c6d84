"""What each loss makes of the same responses: ``megatron-fspo explain``, from a dump of any trainer."""
