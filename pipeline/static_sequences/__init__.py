"""The static pipeline of models whose tables' rows reach the dense network one by one."""
