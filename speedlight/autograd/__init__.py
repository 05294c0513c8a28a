"""What PyTorch must know to differentiate a call: functions, operators, transforms, higher orders."""
