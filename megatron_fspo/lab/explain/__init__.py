"""The decisions of each loss on the same responses: ``megatron-fspo explain``, from a dump of any trainer."""
